"""What orders the tasks, on a real Slurm, with tasks that do nothing: everything is quick and may be disturbed."""

import json
import random

import pytest
from cluster import scenario
from cluster.scenario import kill_job, prepare_noops, wait_for

ITERATIONS = 3


def test_a_run_goes_on_by_itself_and_leaves_nothing_behind(cluster, inputs, environment, tmp_path):
    run = prepare_noops(cluster, inputs, tmp_path / "run", environment, f"iterations={ITERATIONS}")
    run.submit()
    run.wait_until_complete()
    assert [row["iteration"] for row in run.rows()] == list(range(1, ITERATIONS + 1))
    submitted = [e["array"].split(".")[-3] for e in run.events("submitted")]
    # One array for each stage of each iteration, one driver job for each iteration, one guard.
    assert {stage: submitted.count(stage) for stage in set(submitted)} == {
        "prepare": 1,
        "rollout": ITERATIONS,
        "reward": ITERATIONS,
        "update": ITERATIONS,
        "driver": ITERATIONS,
        "guard": 1,
    }
    assert not run.events("failed")
    assert not run.events("rewired")


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_to_jobs_the_run_ends(cluster, inputs, environment, tmp_path, seed):
    """Elements are cancelled, killed and requeued at random, driver jobs too."""
    chance = random.Random(seed)
    run = prepare_noops(
        cluster,
        inputs,
        tmp_path / "run",
        environment,
        f"iterations={ITERATIONS}",
        "rollout.num_shards=4",
        "scheduler.max_attempts=20",
        seconds=0.5,
    )
    run.submit()
    did = []
    for _ in range(8):
        running = run.jobs("RUNNING")
        if running:
            did.append(disturb(run, chance.choice(running), chance))
        scenario.time.sleep(chance.uniform(0.3, 1.5))
    print(did)
    run.wait_until_complete(limit=300)
    assert [row["iteration"] for row in run.rows()] == list(range(1, ITERATIONS + 1))


def disturb(run, job, chance) -> tuple:
    what = chance.choice(["scancel", "kill -9", "requeue"])
    if what == "kill -9":
        kill_job(job)
    else:
        run.cluster.call(*(["scancel"] if what == "scancel" else ["scontrol", "requeue"]), job.id)
    return (what, job.name, job.id)
