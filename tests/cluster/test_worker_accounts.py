"""What workers say that they did with their time, against what Slurm accounts for."""

import json
import os
import signal

from pipeline.run.paths import RunPaths
from pipeline.workers.beats import Doing
from pipeline.workers.reading import read_beats
from pipeline.workers.summary import spent_by
from slurm.devcluster import Cluster
from tests.cluster.scenario import is_used, staying, take, worker_who

HOUR = 3600.0
SET_UP = "scheduler.rollout.setup=[sleep 2]"


def held_seconds(cluster: Cluster) -> dict[str, float]:
    """Seconds that each array element ran, by its name like ``4711_3``; none was requeued."""
    shown = cluster.call("sacct", "-X", "-n", "-P", "--format=JobID,ElapsedRaw").stdout
    return {job: float(seconds) for job, _, seconds in (line.partition("|") for line in shown.splitlines())}


def tolerance(held: float) -> float:
    return max(2.0, 0.02 * held)


def test_workers_account_for_all_that_they_held_and_a_killed_one_for_what_it_said(
    cluster_with_accounting, make_run, tmp_path
):
    cluster = cluster_with_accounting
    words = ["iterations=3", *staying(300), *take("0.5", "rollout", "update"), SET_UP]
    run = make_run(cluster, tmp_path / "run", *words, has_workers=True)
    run.submit()
    killed = worker_who(run, "rollout", Doing.BUSY, is_used)
    os.kill(killed.pid, signal.SIGKILL)
    run.wait_until_complete()
    shown = run.command("status", run.root, "--cost", "--json")
    assert shown.returncode == 0, shown.stderr

    beats, held = read_beats(RunPaths(run.root)), held_seconds(cluster)
    unsaid = {name: held[name.partition("r")[0]] - spent_by(beat).total for name, beat in beats.items()}
    silence = unsaid.pop(killed.worker)
    assert beats[killed.worker].doing is not Doing.LEAVING
    too_much = {name: s for name, s in unsaid.items() if abs(s) > tolerance(held[name.partition("r")[0]])}
    assert not too_much, (unsaid, run.story())

    costs = json.loads(shown.stdout)["cost"]["workers"]
    assert costs.pop("prepare")["held_gpu_hours"] == 0
    for job_kind, hours in costs.items():
        parts = [hours[f"{part}_gpu_hours"] for part in ("busy", "startup", "waiting", "lost")]
        mine = [held[name.partition("r")[0]] for name, beat in beats.items() if beat.job_kind == job_kind]
        assert abs(HOUR * hours["held_gpu_hours"] - sum(mine)) < 1
        assert abs(sum(parts) - hours["held_gpu_hours"]) * HOUR <= sum(map(tolerance, mine))
    assert HOUR * costs["rollout"]["lost_gpu_hours"] >= silence - 1
