"""Responses of older policies on a real Slurm: the bytes of one machine, whatever is killed."""

import contextlib
import os
import signal
import time

import pytest

from pipeline.run.paths import RunPaths
from pipeline.workers.beats import Doing, read_beats
from tests.cluster.conftest import on_one_machine
from tests.cluster.scenario import assert_same_policy, element_of, failed, room_on, staying, take
from tests.support.tables import ON_CLUSTER, sample

ITERATIONS = 6
KILLS = 10


def words(staleness: int) -> list[str]:
    given = [f"rollout.staleness={staleness}", "algorithm.correction.level=token"]
    return [*given, f"iterations={ITERATIONS}"]


@ON_CLUSTER
@pytest.mark.parametrize("staleness", sample([0, 1, 2], 1 / 3))
def test_workers_are_killed_at_random_and_the_policy_is_that_of_one_machine(
    cluster, make_run, inputs, slurm_ppo, chance, tmp_path, staleness
):
    local = on_one_machine(inputs, slurm_ppo, tmp_path / "local", *words(staleness))
    root = room_on(cluster, tmp_path) / "run"
    more = [*staying(60), *take("0.2", "rollout", "reward", "update"), "scheduler.max_attempts=30"]
    run = make_run(cluster, root, *words(staleness), *more)
    run.submit()
    for _ in range(KILLS):
        at_work = run.wait_for(lambda: busy(run) or is_over(run), "a worker at work")
        if is_over(run):
            break
        victim = chance.choice(at_work)
        if chance.random() < 0.3:
            run.cluster.call("scontrol", "requeue", element_of(victim))
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
        time.sleep(chance.uniform(0.2, 1.5))  # another moment of the run
    run.wait_until_complete()
    assert_same_policy(run, local)
    versions = [run.record(i, "rollout")["policy_version"] for i in range(1, ITERATIONS + 1)]
    assert versions == [max(0, i - 1 - staleness) for i in range(1, ITERATIONS + 1)]
    assert failed(run), "some of them had something to do"


@ON_CLUSTER
def test_it_is_refused_where_a_rollout_and_the_update_never_have_places_at_once(cluster, make_run, tmp_path):
    """The node of the rollouts has two GPUs."""
    three = ["scheduler.update.partition=rollout", "scheduler.rollout.gpus_per_node=2"]
    run = make_run(cluster, tmp_path / "run", *words(1), *three)
    for command in ("validate", "submit", "run"):
        done = run.command(command, *run.words, *["--no-probe"] * (command == "validate"))
        assert done.returncode == 2, done.stdout
        assert "never fit at once on rollout0 (32 CPUs, 2 GPUs)" in done.stderr, done.stderr
        assert "set it to 0, or give each stage a place of its own" in done.stderr
    assert not run.root.exists()
    others = [word for word in run.words if not word.startswith("rollout.staleness")]
    done = run.command("validate", *others, "--no-probe")
    assert done.returncode == 0, done.stderr


def busy(run):
    live = read_beats(RunPaths(run.root)).values()
    return [b for b in live if b.doing is Doing.BUSY and os.path.exists(f"/proc/{b.pid}")]  # noqa: PTH110


def is_over(run) -> bool:
    return run.has_committed(ITERATIONS, "update")
