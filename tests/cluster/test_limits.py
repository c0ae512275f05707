"""Limits of an account on a real Slurm with accounting: a run ends, or is refused before it starts, or status
names the limit; and no stage waits for jobs of its own run that have nothing to do."""

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from slurm.devcluster import Layout, PracticeCluster
from tests.cluster.scenario import SlurmRun, staying, take
from tests.support.tables import IS_SOAK, ON_CLUSTER, sample

_NAMED_SECONDS = 60.0
_LONGEST = 240.0
"""Seconds that a run of light tasks takes at most, far below those that its workers stay."""
MODES = {"workers": staying(600), "linger 0": staying(0, start_early=False)}
SUBMITTED = {f"{n} submitted": {"MaxSubmitJobsPerUser": n} for n in range(2, 13)}
RUNNING = {f"{n} running": {"MaxJobsPerUser": n} for n in range(1, 5)}
LIMITS = {
    **SUBMITTED,
    **RUNNING,
    "one GPU": {"GrpTRES": "gres/gpu=1"},
    "short": {"MaxWall": 5},
    "arrays of two": {},
}
CASES = [(limit, mode) for limit in LIMITS for mode in MODES]
QUICK = {"6 submitted", "8 submitted", "10 submitted", "2 running", "4 running", "short"}
"""Those that take seconds: each of them is tried in the suite now and then."""


@dataclass(frozen=True)
class Qos:
    """The QOS that every job has, on a cluster that enforces limits."""

    cluster: PracticeCluster

    def set(self, **limits: object) -> None:
        words = [f"{name}={value}" for name, value in limits.items()]
        done = self.cluster.call("sacctmgr", "-i", "modify", "qos", "normal", "set", *words)
        assert done.returncode == 0, done.stdout + done.stderr

    def lift(self) -> None:
        """Remove all limits, also those that a test has set meanwhile."""
        names = ("MaxSubmitJobsPerUser", "MaxJobsPerUser", "MaxWall")
        self.set(**dict.fromkeys(names, -1), GrpTRES="gres/gpu=-1")


@pytest.fixture
def qos(cluster_with_limits) -> Iterator[Qos]:
    found = Qos(cluster_with_limits)
    found.lift()
    yield found
    found.lift()


def is_named(run: SlurmRun, words: str) -> bool:
    """Whether status names a limit, within the minute."""
    until = time.monotonic() + _NAMED_SECONDS
    while time.monotonic() < until:
        if words in " ".join(run.command("status", run.root).stdout.split()):
            return True
        time.sleep(2)
    return False


def try_limit(run: SlurmRun, limit: str) -> str:
    """Return what came of a run under a limit."""
    done = run.command("submit", *run.words)
    if done.returncode == 2:
        assert "nothing was changed" in done.stderr
        return "refused"
    assert done.returncode == 0, done.stderr + done.stdout
    run.wait_until_complete(_LONGEST)
    return "complete"


def expected(limit: str) -> str:
    too_few = {f"{n} submitted" for n in range(2, 6)}
    return "refused" if limit in {*too_few, "short"} else "complete"


@ON_CLUSTER
@pytest.mark.parametrize(
    ("limit", "mode"),
    CASES if IS_SOAK else sample([case for case in CASES if case[0] in QUICK], 1 / len(QUICK) / 2),
    ids=lambda value: value.replace(" ", "-"),
)
def test_under_a_limit_a_run_ends_or_is_refused(limit, mode, qos, own_cluster, make_run, tmp_path):
    cluster = qos.cluster
    if limit == "arrays of two":
        cluster = own_cluster(Layout(max_array_size=2))
    elif LIMITS[limit]:
        qos.set(**LIMITS[limit])
    run = make_run(cluster, tmp_path / "run", "iterations=2", *MODES[mode], *take("0.2", "update"))
    assert try_limit(run, limit) == expected(limit)


@ON_CLUSTER
def test_a_limit_that_comes_while_a_run_is_at_work_is_named_and_passes_when_it_is_lifted(
    qos, make_run, tmp_path
):
    """The QOS's time is lowered below what jobs ask for: Slurm takes them, and never starts them."""
    run = make_run(qos.cluster, tmp_path / "run", "iterations=1", *MODES["workers"], *take("2", "rollout"))
    run.submit()
    run.wait_for_job("rollout")
    qos.set(MaxWall=1)
    assert is_named(run, "limit of time is reached (QOSMaxWallDurationPerJobLimit)"), run.story()
    shown = " ".join(run.command("status", run.root).stdout.split())
    assert "waiting does not help: give a shorter time" in shown
    qos.lift()
    run.wait_until_complete(_LONGEST)


CLOSED = {
    "partition down": (["partitionname=reward", "state=down"], ["state=up"], "its partition is down"),
    "partition inactive": (["partitionname=reward", "state=inactive"], ["state=up"], "give other partitions"),
    "nodes drained": (
        ["nodename=reward0", "state=drain", "reason=test"],
        ["state=resume"],
        "nodes that it needs are down, drained or reserved",
    ),
}
"""What an administrator does while a run is at work, how it is undone, and what status says meanwhile."""


@ON_CLUSTER
@pytest.mark.parametrize("what", sample(list(CLOSED), 1 / 3))
def test_what_cannot_start_any_more_is_named_within_a_minute_and_goes_on_later(
    what, cluster_with_limits, make_run, tmp_path
):
    close, undo, words = CLOSED[what]
    cluster = cluster_with_limits
    run = make_run(cluster, tmp_path / "run", "iterations=1", *MODES["workers"], *take("2", "rollout"))
    run.submit()
    run.wait_for_job("rollout")
    assert cluster.call("scontrol", "update", *close).returncode == 0
    try:
        run.wait_for(lambda: run.has_committed(1, "rollout"), "a rollout")
        assert is_named(run, words), run.story()
    finally:
        assert cluster.call("scontrol", "update", close[0], *undo).returncode == 0
    run.wait_until_complete(_LONGEST)


def scancel(run: SlurmRun) -> int:
    """Cancel all jobs of a run by one command, as ``scancel -u USER`` does. Returns how many there were."""
    ids = [job.id for job in run.jobs()]
    done: subprocess.CompletedProcess[str] = run.cluster.call("scancel", *{i.partition("_")[0] for i in ids})
    assert done.returncode == 0, done.stderr
    return len(ids)


@ON_CLUSTER
def test_a_run_whose_jobs_somebody_cancels_rests_until_it_is_resumed(cluster_with_limits, make_run, tmp_path):
    """Its jobs may be of an invocation before the newest."""
    words = ["iterations=1", *MODES["workers"], *take("3", "rollout")]
    run = make_run(cluster_with_limits, tmp_path / "run", *words)
    run.submit()
    run.wait_for_job("rollout")
    assert run.command("submit", run.root).returncode == 0
    time.sleep(1.5)  # Slurm's times are whole seconds
    scancel(run)

    def rests() -> bool:
        return not run.jobs() and "cancelled by hand (scancel)" in " ".join(
            run.command("status", run.root).stdout.split()
        )

    run.wait_for(rests, "that it rests, and says so", 60)
    time.sleep(5)
    assert run.jobs() == []
    assert run.command("submit", run.root).returncode == 0
    run.wait_for_job("rollout")
    scancel(run)
    assert run.command("resume", run.root).returncode == 0
    run.wait_until_complete(_LONGEST)
