"""Jobs that stay and start early, on a real Slurm: fewer of them make the same policy, whatever ends them.

Tasks are light: each version of the policy is a hash of all that it was made from.
"""

import os
import signal
from pathlib import Path

import pytest

from pipeline.run.directory import load_run
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import job_kind_of
from pipeline.workers.beats import Doing, Reason, read_beats
from tests.cluster.scenario import (
    SHARDS,
    STAGES,
    Hold,
    SlurmRun,
    assert_same_policy,
    element_of,
    failed,
    held_at_work,
    is_used,
    outside_slurm,
    policy_of,
    read_lines,
    room_on,
    staying,
    take,
    wait_for_commit_by,
    worker_who,
)
from tests.support.measured import RULED, fingerprints, measured_apart
from tests.support.tables import IS_SOAK, ON_CLUSTER, sample

ITERATIONS = 20
STAYING = staying(300)


# --- submitted first and looked at last: meanwhile the other tests run ---


@pytest.fixture(scope="module", autouse=True)
def cut_short(cluster, make_run, tmp_path_factory) -> SlurmRun:
    """Somebody shortens the time limit of the first rollout jobs while they are at their second task, which
    would not end."""
    folder = tmp_path_factory.mktemp("cut_short")
    root = room_on(cluster, folder) / "run"
    (folder / "cut.sh").write_text(CUT.replace("RUN", str(root)))
    words = ["iterations=3", f"scheduler.rollout.setup=['. {folder}/cut.sh']", "scheduler.rollout.signal=5"]
    run = make_run(cluster, root, *words, *STAYING)
    run.submit()
    return run


CUT = """
case $SLURM_JOB_NAME in *.rollout.iter1.*.1.*)
  export LIGHT_SECONDS="0 0 0 1000"
  element=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  cut() {
    for second in $(seq 100); do
      grep -s '"doing": "busy"' "RUN/slurm/workers/${element}r0.json" | grep -q '"tasks": [1-9]' && break
      sleep 1
    done
    scontrol update jobid=$element TimeLimit=1
  }
  cut &
esac
"""


@pytest.fixture(scope="module", autouse=True)
def poisoned(cluster, make_run, tmp_path_factory) -> SlurmRun:
    """A rule of the user's fails for one prompt. Submitted first and looked at last."""
    folder = tmp_path_factory.mktemp("poisoned")
    (folder / "my_picky_rules.py").write_text(PICKY)
    rule = "+reward.components.mine={kind: rule, function: 'my_picky_rules:score', trial: false}"
    words = ["iterations=2", "scheduler.max_attempts=2", rule, *STAYING]
    run = make_run(cluster, room_on(cluster, folder) / "run", *words, folder=folder)
    run.submit()
    return run


PICKY = """
def score(*, prompts, **columns):
    if any("aa6" in str(prompt) for prompt in prompts):
        raise KeyError("my own mistake")
    return [0.0 for prompt in prompts]
"""


# --- the others ---


def elements(run: SlurmRun) -> int:
    """Number of array elements of stages that were submitted."""
    arrays = [e for e in run.events("submitted") if job_kind_of(e["array"]) in STAGES]
    return sum(event["elements"] for event in arrays)


def test_workers_make_the_policy_of_one_machine_with_a_few_jobs(cluster, make_run, long_local_run, tmp_path):
    """As a user has them, who sets nothing: two places for four shards."""
    root = room_on(cluster, tmp_path) / "run"
    run = make_run(cluster, root, "iterations=5")
    run.submit()
    run.wait_for_job("update")
    assert not outside_slurm(str(root))
    run.wait_until_complete()
    assert not outside_slurm(str(root))
    assert_same_policy(run, long_local_run)
    assert not failed(run)
    assert elements(run) < 5 * 5
    left = read_beats(RunPaths(root)).values()
    for_other_runs = Reason.NEEDED  # those of these tests that were submitted before
    in_order = {Reason.DONE, Reason.ONE, Reason.FAR, Reason.LONG, for_other_runs}
    assert {b.reason for b in left if is_used(b)} <= in_order


@ON_CLUSTER
def test_policies_are_measured_by_workers_of_rollouts_to_the_same_bytes(cluster, make_run, tmp_path):
    """As they have nothing else to do, and all stages have places at once: no job of evaluations comes."""
    root = room_on(cluster, tmp_path) / "run"
    places = [f"scheduler.{stage}.gpus_per_node=null" for stage in (*STAGES, "evaluate")]
    heldout = [f"data.heldout={make_run.inputs / 'heldout.jsonl'}", "evaluate.every=1"]
    few = ["scheduler.rollout.array_parallelism=2", "scheduler.reward.array_parallelism=1"]
    words = ["iterations=2", *RULED, *heldout, *places, *few, *STAYING, *take("2", "update")]
    run = make_run(cluster, root, *words)
    run.submit()
    run.wait_until_complete()
    assert fingerprints(load_run(root)) == measured_apart(root, tmp_path / "apart")
    assert "evaluate" not in {job.stage for job in run.jobs_ever()}, run.story()
    assert sum(beat.measured for beat in read_beats(RunPaths(root)).values()) == 3
    assert not failed(run)


@ON_CLUSTER
def test_workers_are_killed_cancelled_requeued_and_the_controller_restarts(
    cluster, make_run, long_local_run, tmp_path
):
    root = room_on(cluster, tmp_path) / "run"
    words = [f"iterations={ITERATIONS}", *STAYING, *take("0.3", "rollout")]
    run = make_run(cluster, root, *words)
    run.submit()

    computing = worker_who(run, "rollout", Doing.BUSY, is_used)
    os.kill(computing.pid, signal.SIGKILL)
    iteration, _, shard = computing.task.split("/")
    run.wait_for(lambda: run.has_committed(int(iteration), "rollout", int(shard)), "what it was at")

    waiting = worker_who(run, "update", Doing.WAITING, is_used)
    os.kill(waiting.pid, signal.SIGKILL)
    wait_for_commit_by(run, "update", lambda worker: worker != waiting.worker)

    done = worker_who(run, "rollout", Doing.WAITING, is_used)
    so_far = newest(run)
    run.cluster.call("scontrol", "requeue", element_of(done))
    run.wait_for(lambda: newest(run) > so_far + 1, "an iteration without whoever waits in the queue again")

    scored = worker_who(run, "reward", Doing.WAITING, is_used)
    so_far = newest(run)
    run.cluster.call("scancel", element_of(scored))
    run.wait_for(lambda: newest(run) > so_far + 1, "an iteration that others have scored")

    run.cluster.kill_controller()
    so_far = newest(run)
    run.wait_for(lambda: newest(run) > so_far + 1, "an iteration while there is no controller")
    run.cluster.start_controller()
    run.wait_until_complete()
    assert_same_policy(run, long_local_run)
    # Told of, though another did it at once. Who was found waiting may have begun something meanwhile.
    assert (computing.task, "killed") in failed(run), run.story()
    assert {kind for _, kind in failed(run)} <= {"killed", "preempted"}, run.story()
    stages = [row["stages"] for row in read_lines(root / "spans.jsonl")]
    assert any(of["reward"]["started"] < of["rollout"]["ended"] for of in stages), (
        "one scored beside the next"
    )


def newest(run: SlurmRun) -> int:
    return next((k for k in range(ITERATIONS, 0, -1) if run.has_committed(k, "update")), 0)


@ON_CLUSTER
def test_going_back_and_cancelling_end_the_workers(cluster, make_run, long_local_run, tmp_path):
    """Those that wait, and those that compute what is taken back."""
    root, hold = room_on(cluster, tmp_path) / "run", Hold(tmp_path / "hold")
    words = ["iterations=4", *STAYING, hold.on("rollout", "0.2")]
    run = make_run(cluster, root, *words)
    run.submit()
    run.wait_for(lambda: run.has_committed(2, "update"), "two iterations")
    hold.begin()
    before = set(read_beats(RunPaths(root)))
    held_at_work(run, hold, "rollout")
    worker_who(run, "reward", Doing.WAITING, is_used)

    resumed = run.begin("resume", root, "--from", "reward@2")
    run.wait_for(lambda: not run.has_committed(2, "update"), "the way back")
    hold.end()
    run.wait_for(lambda: run.has_committed(2, "update"), "the second policy, again")
    started = set(read_beats(RunPaths(root))) - before
    assert started, "those of before have ended"
    cancelled = run.command("cancel", root)
    assert cancelled.returncode == 0, cancelled.stderr
    run.wait_for(lambda: not run.jobs(), "an empty queue", 30)
    resumed.communicate(timeout=60)
    beats = read_beats(RunPaths(root))
    assert not [b for b in beats.values() if Path(f"/proc/{b.pid}").exists()]
    said = {b.reason for b in beats.values() if b.worker in started and b.doing is Doing.LEAVING}
    assert said <= {Reason.WARNED, Reason.TURNED}

    done = run.command("submit", root)
    assert done.returncode == 0, done.stderr
    run.wait_until_complete()
    assert_same_policy(run, long_local_run)
    assert failed(run) == [], "what a person cancelled has not failed"


def test_a_shard_that_fails_everywhere_is_counted_as_one(poisoned):
    run = poisoned
    run.wait_for(lambda: run.events("gave_up"), "the end of the budget")
    run.wait_for(lambda: not run.jobs(), "an empty queue")
    (task,) = {task for task, _ in failed(run)}
    assert failed(run) == [(task, "error")] * 2, run.story()
    scored = [run.has_committed(1, "reward", shard) for shard in range(SHARDS)]
    assert scored == [shard != int(task[-1]) for shard in range(SHARDS)], "the other shards are scored"

    resumed = run.command("resume", run.root)
    assert resumed.returncode == 1
    assert f"failed: iteration 1 reward shard {task[-1]}, attempt 4 (error)" in resumed.stderr
    assert "my own mistake" in resumed.stderr
    assert f"slurm-ppo resume {run.root}" in resumed.stderr
    run.wait_for(lambda: not run.jobs(), "an empty queue")


def test_a_used_worker_meets_its_time_limit_and_another_goes_on_from_what_it_saved(cut_short, long_local_run):
    run = cut_short
    run.wait_until_complete()
    assert_same_policy(run, long_local_run)
    assert {kind for _, kind in failed(run)} == {"paused"}, run.story()
    left = [b for b in read_beats(RunPaths(run.root)).values() if b.job_kind == "rollout"]
    assert [b for b in left if is_used(b) and b.reason is Reason.WARNED], left
    logs = run.logs("*-rollout/*/*")
    assert any("continues from" in log for log in logs.values()), logs


# --- stages of a run, and runs of one user, that share a place or two ---


MADE_ROOM = {Reason.NEEDED, Reason.DONE, Reason.WARNED, Reason.ONE}
"""Why workers of these runs leave: never since a time was over, or since something is far."""


def sharing(gpus: int) -> list[str]:
    """Words that put all stages on the two GPUs of one node, each job on so many of them."""
    stages = (*STAGES, "evaluate")
    places = [(f"scheduler.{s}.partition=rollout", f"scheduler.{s}.gpus_per_node={gpus}") for s in stages]
    return [word for words in places for word in words]


def assert_whoever_waited_made_room(run: SlurmRun, expected: Path) -> None:
    left = read_beats(RunPaths(run.root)).values()
    assert {beat.doing for beat in left} == {Doing.LEAVING}, run.story()
    assert {beat.reason for beat in left} <= MADE_ROOM, [*left, run.story()]
    assert Reason.NEEDED in {beat.reason for beat in left}, "one at least had to make room"
    assert run.policy() == policy_of(expected), run.story()
    assert not run.events("failed"), run.story()


@ON_CLUSTER
@pytest.mark.parametrize("start_early", sample([False, True], 1 / 2), ids="early={}".format)
def test_three_stages_share_one_place(cluster, make_run, complete_run, tmp_path, start_early):
    words = ["iterations=2", *staying(300, start_early), *sharing(gpus=2)]
    run = make_run(cluster, tmp_path / "run", *words)
    run.submit()
    run.wait_until_complete(limit=250)
    assert_whoever_waited_made_room(run, complete_run)


@ON_CLUSTER
def test_several_runs_share_two_places(cluster, make_run, complete_run, tmp_path):
    """Six of them, in the suite three."""
    words = ["iterations=2", *staying(300), *sharing(gpus=1)]
    runs = [make_run(cluster, tmp_path / f"run{number}", *words) for number in range(6 if IS_SOAK else 3)]
    for run in runs:
        run.submit()
    for run in runs:
        run.wait_until_complete()
        assert_whoever_waited_made_room(run, complete_run)
