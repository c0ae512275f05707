"""Partition, time and memory change while a run is at work: the next jobs have them, the bytes stay."""

import re

from pipeline.run.directory import load_run
from tests.cluster.scenario import SHARDS, Hold, SlurmRun, assert_same_policy, room_on, staying
from tests.support.changed import REFUSED, fork_words
from tests.support.tables import ON_CLUSTER, sample

MOVED = (
    "scheduler.rollout.partition=reward",
    "scheduler.rollout.time=0:20:00",
    "scheduler.rollout.mem=500M",
)
FROZEN = sample(
    [word for _, word in REFUSED if not word.startswith(("scheduler.", "rollout.num_shards"))], 1 / 40
)
"""Settings that a fork alone can have; the others are of one machine, or those of the run."""


def asked(run: SlurmRun, iteration: int, stage: str) -> list[dict[str, str]]:
    """Options of the batch scripts that were submitted for a stage, in their order."""
    scripts = sorted((run.root / "slurm" / f"{iteration:05d}").glob(f"{stage}-*.sh"))
    return [dict(re.findall(r"^#SBATCH --(\S+?)=(\S+)", file.read_text(), re.M)) for file in scripts]


def moved(options: dict[str, str]) -> tuple[str | None, ...]:
    return options["partition"], options["time"], options.get("mem")


def test_what_is_changed_while_a_run_is_at_work_the_next_jobs_have(cluster, make_run, complete_run, tmp_path):
    """Rewards are held up until the change is made, however long that takes."""
    hold = Hold(tmp_path / "hold")
    hold.begin()
    words = ("iterations=2", *staying(300), hold.on("reward"))
    run = make_run(cluster, room_on(cluster, tmp_path) / "run", *words)
    run.submit()
    run.wait_for(lambda: all(run.has_committed(1, "rollout", shard) for shard in range(SHARDS)), "responses")
    done = run.command("submit", run.root, *MOVED)
    assert done.returncode == 0, done.stderr
    refused = run.command("submit", run.root, "scheduler.rollout.partition=nowhere")
    assert refused.returncode == 2
    assert "nothing was changed" in refused.stderr
    hold.end()
    run.wait_for(lambda: run.has_committed(1, "update"), "a version to fork from")
    for number, word in enumerate(FROZEN):
        refused = run.command("submit", run.root, word)
        assert refused.returncode == 2, f"{word}: {refused.stderr}"
        words = fork_words(refused.stderr)
        words[2] = tmp_path / f"fork{number}"
        made = run.command(*words)
        assert made.returncode == 0, f"{word}: {made.stderr}"
    run.wait_until_complete()
    assert moved(asked(run, 2, "rollout")[-1]) == ("reward", "0:20:00", "500M"), run.story()
    assert {moved(one)[0] for one in asked(run, 1, "rollout")} == {"rollout"}
    assert not run.events("failed"), run.story()
    assert_same_policy(run, complete_run)
    history = run.command("config", run.root, "--history").stdout
    assert "scheduler.rollout.partition [rollout] -> [reward]" in history


@ON_CLUSTER
def test_jobs_that_wait_in_vain_move_and_who_is_killed_in_between_has_made_the_change(
    cluster, make_run, complete_run, tmp_path
):
    """Rewards wait in a partition that another job fills."""
    fills = cluster.call("sbatch", "-preward", "--exclusive", "-o/dev/null", "--wrap", "sleep 900")
    assert fills.returncode == 0, fills.stderr
    try:
        run = make_run(cluster, room_on(cluster, tmp_path) / "run", "iterations=1", *staying(5))
        run.submit()
        run.wait_for(lambda: run.has_committed(1, "rollout"), "responses")
        run.wait_for_job("reward", "PENDING")
        typed = run.begin("submit", run.root, "scheduler.reward.partition=rollout")
        run.wait_for(lambda: (run.root / "settings.json").exists(), "a change")
        typed.kill()
        typed.communicate()
        run.wait_until_complete()
    finally:
        cluster.call("scancel", fills.stdout.split()[-1])
    assert load_run(run.root).config.slurm.reward.partition == ("rollout",)
    assert not run.events("failed"), run.story()
    assert_same_policy(run, complete_run)
