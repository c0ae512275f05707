"""What workers say that they did with their time, against what Slurm accounts for."""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterable

from pipeline.run.lease import hold
from pipeline.run.paths import RunPaths
from pipeline.workers.beats import Beat, Doing, read_beats
from pipeline.workers.summary import spent_by
from slurm.devcluster import PracticeCluster
from tests.cluster.scenario import element_of, is_used, staying, take, worker_who
from tests.support.tables import ON_CLUSTER

HOUR = 3600.0
SET_UP = "scheduler.rollout.setup=[sleep 2]"


def held_seconds(cluster: PracticeCluster) -> dict[str, float]:
    """Seconds that each array element ran in all, by its name like ``4711_3``. One that was requeued has a
    line for each start."""
    shown = cluster.call("sacct", "-D", "-X", "-n", "-P", "--format=JobID,ElapsedRaw").stdout
    held: Counter[str] = Counter()
    for job, _, seconds in (line.partition("|") for line in shown.splitlines()):
        held[job] += float(seconds)
    return dict(held)


def said_seconds(beats: Iterable[Beat]) -> dict[str, float]:
    """Seconds that workers say they had, by the names of their elements."""
    said: Counter[str] = Counter()
    for beat in beats:
        said[element_of(beat)] += spent_by(beat).total
    return dict(said)


def tolerance(held: float) -> float:
    return max(2.0, 0.02 * held)


@ON_CLUSTER
def test_workers_account_for_all_that_they_held_and_a_killed_one_for_what_it_said(
    cluster_with_accounting, make_run, tmp_path
):
    """One is requeued, and starts once more under the same number."""
    cluster = cluster_with_accounting
    words = ["iterations=4", *staying(300), *take("0.5", "rollout", "update"), SET_UP]
    run = make_run(cluster, tmp_path / "run", *words)
    run.submit()
    requeued = worker_who(run, "update", Doing.WAITING, is_used)  # its next input comes soon: it is kept
    with hold(RunPaths(run.root).locks, 60):  # a pass that finds it gone submits another in its place
        cluster.call("scontrol", "requeue", element_of(requeued))
        again = f"{element_of(requeued)}r1"
        run.wait_for(lambda: again in read_beats(RunPaths(run.root)), "it to have started again")
    killed = worker_who(run, "rollout", Doing.BUSY, is_used)
    os.kill(killed.pid, signal.SIGKILL)
    run.wait_until_complete()
    shown = run.command("status", run.root, "--cost", "--json")
    assert shown.returncode == 0, shown.stderr

    beats, held = read_beats(RunPaths(run.root)), held_seconds(cluster)
    restarted = [name for name in beats if name.startswith(f"{element_of(requeued)}r")]
    assert len(restarted) == 2, run.story()
    unsaid = {name: held[name] - seconds for name, seconds in said_seconds(beats.values()).items()}
    silence = unsaid.pop(element_of(killed))
    assert beats[killed.worker].doing is not Doing.LEAVING
    too_much = {name: s for name, s in unsaid.items() if abs(s) > tolerance(held[name])}
    assert not too_much, (unsaid, run.story())

    costs = json.loads(shown.stdout)["cost"]["workers"]
    assert costs.pop("prepare")["held_gpu_hours"] == 0
    for job_kind, hours in costs.items():
        parts = [hours[f"{part}_gpu_hours"] for part in ("busy", "startup", "waiting", "lost")]
        mine = [held[name] for name in {element_of(b) for b in beats.values() if b.job_kind == job_kind}]
        assert abs(HOUR * hours["held_gpu_hours"] - sum(mine)) < 1
        assert abs(sum(parts) - hours["held_gpu_hours"]) * HOUR <= sum(map(tolerance, mine))
    assert HOUR * costs["rollout"]["lost_gpu_hours"] >= silence - 1
