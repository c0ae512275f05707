"""Copies of a run on a real Slurm: whose the jobs are; and a run whose identity a purge has taken."""

import time

import pytest

from tests.cluster.scenario import Hold, SlurmRun, policy_of, queue_of, read_lines, room_on, wait_for
from tests.support.copying import TOOLS, copied
from tests.support.tables import ON_CLUSTER, sample


def jobs_on(run: SlurmRun) -> set[str]:
    return {job.id.partition("_")[0] for job in queue_of(run.cluster)}


def rollouts(run: SlurmRun) -> set[str]:
    return {job.id for job in run.jobs("RUNNING") if job.stage == "rollout"}


@ON_CLUSTER
@pytest.mark.parametrize("tool", sample(list(TOOLS), 1 / len(TOOLS)))
def test_a_copy_leaves_the_jobs_of_a_live_run_alone_and_goes_on_once_that_has_ended(
    cluster, make_run, long_local_run, tmp_path, tool
):
    room = room_on(cluster, tmp_path)
    hold = Hold(room / "hold")
    hold.begin()
    run = make_run(cluster, room / "run", "iterations=2", hold.on("rollout"))
    run.submit()
    run.wait_for(lambda: list(room.glob("hold.*")), "rollouts at work")
    before, copy = rollouts(run), copied(run.root, room / "copy", tool)
    begun = time.monotonic()
    for command in ("cancel", "submit"):
        done = run.command(command, copy)
        assert done.returncode == 2, done.stderr
        assert f"{copy} is a copy" in done.stderr
        assert f"slurm-ppo cancel {run.root}" in done.stderr
    assert time.monotonic() - begun < 10, "5 s for each"
    shown = run.command("status", copy).stdout
    assert "stopped" in shown.splitlines()[0]
    assert "0 jobs run" in shown or "nothing of this run is in" in " ".join(shown.split())
    assert before == rollouts(run)
    # A purge takes the original's settings: its jobs can be ended all the same.
    for name in ("config.yaml", "config.copy.yaml"):
        (run.root / name).unlink()
    done = run.command("cancel", run.root)
    assert done.returncode == 0, done.stderr
    run.wait_for(lambda: not jobs_on(run), "the end of all jobs", 60)
    hold.end()
    done = run.command("submit", copy)
    assert done.returncode == 0, done.stderr
    assert f"{copy} is a copy of {run.root}, and goes on as a run of its own" in done.stderr
    wait_for(
        lambda: len(read_lines(copy / "metrics.jsonl")) == 2 and not jobs_on(run),
        "the end of the copy",
        120,
        run.cluster.return_nodes,
    )
    assert policy_of(copy, 2) == policy_of(long_local_run, 2)
    assert not run.rows()
