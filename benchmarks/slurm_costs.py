"""What a run on Slurm cost, for benchmarks: calls of Slurm's commands, starts of workers, what they held."""

import functools
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeline.config.scheduler import resources_of
from pipeline.run import journal
from pipeline.run.directory import Run, slurm_settings
from pipeline.run.submissions import SUBMITTED, is_driver_job
from pipeline.workers.beats import Beat, read_beats
from pipeline.workers.summary import Spent, WorkersOf, spent_by, workers_of
from slurm.devcluster import PracticeCluster
from tests.support.counting import Call, most_in_a_minute

_ACCOUNTED = 5.0
"""Seconds until accounting has the end of a job."""


# --- calls -----------------------------------------------------------------------------------------------


class Kind(StrEnum):
    """Kinds of calls."""

    QUERY = "queries"
    SUBMISSION = "submissions"
    SIGNAL = "signals"
    CANCELLATION = "cancellations"
    OTHER = "others"


def kind_of(call: Call) -> Kind:
    if call.is_query:
        return Kind.QUERY
    if call.program == "scancel":
        is_signal = "--batch" in call.words  # the program's signals all go to batch scripts
        return Kind.SIGNAL if is_signal else Kind.CANCELLATION
    return Kind.SUBMISSION if call.program == "sbatch" else Kind.OTHER


def count(calls: Iterable[Call], *kinds: Kind) -> int:
    return sum(kind_of(call) in kinds for call in calls)


# --- workers ---------------------------------------------------------------------------------------------


def hand_overs(lives: Iterable[tuple[float, float]]) -> list[float]:
    """Return the times at which a worker starts in a place that another one had before, of the workers that
    share some places: all starts but the first ones, as many as there ever were at once. Pure.

    Args:
        lives: first and last time of each worker.
    """
    known = list(lives)
    moves = sorted([*((first, 1) for first, _ in known), *((last, -1) for _, last in known)])
    now = most = 0
    for _, change in moves:
        now += change
        most = max(most, now)
    return sorted(first for first, _ in known)[most:]


@dataclass(frozen=True)
class Cost:
    """Cost of one run, or of several together."""

    workers: Sequence[WorkersOf]
    spent: Spent
    """GPU-seconds: seconds of workers, times the GPUs that each holds."""
    hand_overs: Sequence[float]
    """Unix times at which workers started in the places of others."""
    startup: float
    """Median of the start-ups, in seconds."""
    calls: Sequence[Call]
    submitted: float = 0.0
    """Unix time at which the command that submitted had ended: what it asks to check settings comes once."""
    accounted: float | None = None
    """GPU-seconds of all jobs, as sacct has them; None without accounting."""
    watching: int = 0
    """Submissions of jobs that only make passes: guards and driver jobs."""

    @property
    def starts(self) -> int:
        return sum(one.starts for one in self.workers)

    @property
    def without_task(self) -> int:
        return sum(one.without_task for one in self.workers)

    @property
    def evicted(self) -> int:
        return sum(one.evicted for one in self.workers)

    @property
    def held(self) -> float:
        """GPU-seconds held, for each that was busy or started up."""
        needed = self.spent.busy + self.spent.startup
        return (self.accounted or self.spent.total) / needed if needed else 1.0

    @property
    def queries(self) -> int:
        """Most queries in a minute, but for those of the command that submitted."""
        return most_in_a_minute([call for call in self.calls if call.time > self.submitted])[0]

    @property
    def orders(self) -> int:
        """Submissions, signals and cancellations."""
        return count(self.calls, Kind.SUBMISSION, Kind.SIGNAL, Kind.CANCELLATION)


def cost_of(
    runs: Sequence[Run], calls: Sequence[Call], submitted: float = 0.0, accounted: float | None = None
) -> Cost:
    """Read what runs of the same settings, in the same partitions, cost together."""
    beats = [beat for run in runs for beat in read_beats(run.paths).values()]
    settings = slurm_settings(runs[0])
    places: dict[str, list[tuple[float, float]]] = {}
    for beat in beats:
        partition = str(resources_of(settings, beat.job_kind).partition)
        places.setdefault(partition, []).append((beat.started, beat.beat))

    def gpus(job_kind: str) -> int:
        given = resources_of(settings, job_kind)
        return int(given.gpus_per_node or 1) * given.nodes  # who asks for none holds a place all the same

    times = sorted(when for lives in places.values() for when in hand_overs(lives))
    startups = [beat.startup_seconds for beat in beats if beat.startup_seconds]
    return Cost(
        workers_of(beats, max((beat.beat for beat in beats), default=0.0), running=()),
        gpu_seconds(beats, gpus),
        times,
        statistics.median(startups) if startups else 0.0,
        calls,
        submitted,
        accounted,
        sum(map(is_driver_job, names_of_submitted(runs))),
    )


def names_of_submitted(runs: Sequence[Run]) -> list[str]:
    """Return the names of all arrays and jobs that were submitted for some runs."""
    events = (event for run in runs for event in journal.read(run.paths.events))
    return [event["array"] for event in events if event["event"] == SUBMITTED]


def gpu_seconds(beats: Iterable[Beat], gpus: Callable[[str], int]) -> Spent:
    """Add up how workers spent their time, times the GPUs that those of their job kind hold. Pure."""
    each = ((gpus(beat.job_kind), spent_by(beat)) for beat in beats)
    times = [Spent(n * spent.startup, n * spent.busy, n * spent.waiting) for n, spent in each]
    return functools.reduce(Spent.plus, times, Spent())


def accounted_gpu_seconds(cluster: PracticeCluster, ids: Collection[str]) -> float | None:
    """Return the GPU-seconds of all jobs of runs of these ids, as sacct has them; None without accounting."""
    if not cluster.accounting:
        return None
    time.sleep(_ACCOUNTED)
    shown = cluster.call("sacct", "-a", "-D", "-X", "-n", "-P", "--format=ElapsedRaw,AllocTRES,JobName")
    total = 0.0
    for line in shown.stdout.splitlines():
        elapsed, resources, name = line.split("|")
        gpus = [part.partition("=")[2] for part in resources.split(",") if part.startswith("gres/gpu=")]
        if any(f".{one}." in name for one in ids) and gpus:
            total += float(elapsed) * int(gpus[0])
    return total


def in_words(cost: Cost) -> list[str]:
    """Say in three lines what was started, what was held, and what Slurm was asked."""
    spent, calls = cost.spent, cost.calls
    held = f"{spent.total:.0f} GPU-seconds held by workers"
    if cost.accounted is not None:
        held += f", {cost.accounted:.0f} by jobs"
    counts = ", ".join(f"{count(calls, kind)} {kind}" for kind in Kind)
    return [
        f"{cost.starts} starts, {cost.without_task} without a task, {cost.evicted} evicted; "
        f"{len(cost.hand_overs)} hand-overs; start-up {cost.startup:.1f} s (median)",
        f"{held}: {cost.held:.2f} of {spent.busy:.0f} busy + {spent.startup:.0f} start-up",
        f"{cost.queries} queries in the worst minute behind the submission; {counts} "
        f"({cost.watching} of the submissions are guards and driver jobs); "
        f"of submissions, signals and cancellations {cost.orders / max(1, cost.starts):.1f} for a start",
    ]


def worst_costs(costs: Sequence[Cost]) -> Iterator[str]:
    """Say the most of each number that any of the runs had."""
    if costs:
        started, idle, evicted = (
            max(getattr(cost, name) for cost in costs) for name in ("starts", "without_task", "evicted")
        )
        yield (
            f"at most {started} starts in a run, {idle} without a task, {evicted} evicted; held "
            f"{max(cost.held for cost in costs):.2f} of busy + start-up; "
            f"{max(cost.queries for cost in costs)} queries in a minute"
        )
