"""What to expect: when a task's inputs will be there, how long a start and the queue take. Pure.

From what earlier iterations and workers took: medians, and None where nothing is known. Nothing here decides
about results; a wrong estimate costs time.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pipeline.run.plan import Plan
from pipeline.run.tasks import Task
from pipeline.workers.beats import Beat, Doing

_RECENT = 8
"""Iterations of which a median is taken: enough for a steady one, few enough to follow a change."""
_COMMITTED = "committed"
"""What spans say of an attempt that won; stages, which read them by this module, import no metrics."""
_LATE = 0.8
"""Quantile that stands for a long wait."""


@dataclass(frozen=True)
class Passage:
    """One iteration's passage through a stage (or a pool's scores)."""

    iteration: int
    job_kind: str
    seconds: float
    """From the first of its inputs being there to the last of its results."""
    at_work: float
    """From the first start of one of its tasks to the last of its results."""
    warm: float
    """Seconds during which any of its tasks had finished loading: the duration where processes stay."""


@dataclass(frozen=True)
class Spread:
    """Seconds that something took."""

    median: float
    late: float
    """Longer than in four of five cases."""
    least: float
    mean: float
    """What counts where few cases take very long, as in a queue behind others."""


def passages(lines: Iterable[Mapping[str, Any]]) -> list[Passage]:
    """Read passages from lines of ``spans.jsonl`` (:mod:`pipeline.metrics.spans`); what is no such line, or
    lacks a time, is left out."""
    found: dict[tuple[int, str], Passage] = {}
    for line in lines:
        stages, iteration = line.get("stages"), line.get("iteration")
        if isinstance(stages, dict) and isinstance(iteration, int):
            warm = _warm_seconds(line.get("attempts"))
            for job_kind, stage in stages.items():
                if (seconds := _seconds(stage, "ready")) is not None:
                    started = _seconds(stage, "started")
                    at_work = seconds if started is None else min(started, seconds)
                    least = min(at_work, warm.get(job_kind, at_work))
                    found[iteration, job_kind] = Passage(iteration, job_kind, seconds, at_work, least)
    return list(found.values())


def _warm_seconds(attempts: Any) -> dict[str, float]:
    """Return, by job kind, for how long any committed attempt was past loading; nothing for what has no such
    columns."""
    if not isinstance(attempts, dict):
        return {}
    spans: dict[str, list[tuple[float, float]]] = {}
    columns = [attempts.get(name) for name in ("job_kind", "end", "computing", "ended")]
    if not all(isinstance(column, list) for column in columns):
        return {}
    for job_kind, end, computing, ended in zip(*(column or () for column in columns), strict=False):
        if end == _COMMITTED and isinstance(computing, int | float) and isinstance(ended, int | float):
            spans.setdefault(str(job_kind), []).append((float(computing), float(ended)))
    return {job_kind: _covered(found) for job_kind, found in spans.items()}


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _seconds(stage: Any, since: str) -> float | None:
    begun, ended = (stage.get(since), stage.get("ended")) if isinstance(stage, dict) else (None, None)
    if not isinstance(begun, int | float) or not isinstance(ended, int | float):
        return None
    return max(0.0, float(ended) - float(begun))


def turnaround(
    seen: Iterable[Passage], job_kind: str, staying: Collection[str] | None = None, is_early: bool = False
) -> float | None:
    """Return the median of the last passages through a stage, in seconds.

    Args:
        staying: job kinds of which processes stay if that pays. Return the shortest passage instead, without
            what its tasks waited for jobs to start, and without their loading if processes of its kind stay.
            What somebody would not wait for even so is far away. Past waits and loading do not count
            for that: who leaves for them makes others wait, who then leave for that.
        is_early: whether its jobs start early, so that tasks do not wait for them. Those that once did say
            nothing of the next: who comes later for them makes others wait, and is late again.
    """
    mine = sorted((p for p in seen if p.job_kind == job_kind), key=lambda passage: passage.iteration)
    if not mine:
        return None
    newest = mine[-_RECENT:]
    if staying is None:
        return statistics.median(p.at_work if is_early else p.seconds for p in newest)
    return min(p.warm if job_kind in staying else p.at_work for p in newest)


def expected_ready(
    plan: Plan,
    task: Task,
    committed_at: Callable[[Task], float | None],
    seen: Sequence[Passage],
    now: float,
    staying: Collection[str] | None = None,
    early: Collection[str] = (),
) -> float | None:
    """Return when the inputs of a task are expected to be there (unix time), or were; None if unknown.

    Each stage that is not done takes as long as in earlier iterations, from when its own inputs are there;
    one that has taken longer already is expected now.

    Args:
        committed_at: returns when a task was committed, None if it is not.
        staying: job kinds of which processes stay: expect each stage to be as quick as :func:`turnaround`
            says of the best.
        early: job kinds whose jobs start early.
    """
    known: dict[tuple[int, str], float | None] = {}

    def ready(task: Task) -> float | None:
        times = [committed(source) for source in _one_of_each(plan.inputs(task), committed_at)]
        if any(time is None for time in times):
            return None
        return max((time for time in times if time is not None), default=now)

    def committed(task: Task) -> float | None:
        key = task.iteration, task.job_kind
        if key not in known:
            known[key] = committed_at(task) or expected(task)
        return known[key]

    def expected(task: Task) -> float | None:
        seconds, begun = turnaround(seen, task.job_kind, staying, task.job_kind in early), ready(task)
        return None if seconds is None or begun is None else max(now, begun + seconds)

    return ready(task)


def _one_of_each(tasks: Iterable[Task], committed_at: Callable[[Task], float | None]) -> Iterable[Task]:
    """Return one task of each kind and iteration, one that is not committed if there is any."""
    done: dict[tuple[int, str, str], Task] = {}
    undone: dict[tuple[int, str, str], Task] = {}
    for task in tasks:
        key = task.iteration, task.stage, task.pool
        if key not in undone:
            (undone if committed_at(task) is None else done).setdefault(key, task)
    return (done | undone).values()


def startup(beats: Iterable[Beat], job_kind: str) -> Spread | None:
    """Return how long workers of a kind take from their start until they can begin with a task: of those who
    started up alone on their machine, if there are any, as several make each other slow. Who left without
    having done a task, for another's sake perhaps, says nothing of it."""
    known = list(beats)
    mine = [beat for beat in _newest(known, job_kind) if beat.startup_seconds and not _left_in_vain(beat)]
    near: dict[str, list[Beat]] = {beat.host: [] for beat in mine}
    since = min((beat.started for beat in mine), default=0.0)
    for beat in known:
        if beat.started + beat.startup_seconds > since and beat.host in near:
            near[beat.host].append(beat)
    alone = [beat for beat in mine if not _has_company(beat, near[beat.host])]
    return _spread(beat.startup_seconds for beat in alone or mine)


def _left_in_vain(beat: Beat) -> bool:
    return beat.doing is Doing.LEAVING and not beat.tasks


def _has_company(one: Beat, near: Iterable[Beat]) -> bool:
    """Whether any of those on its machine started up at the same time."""
    begun, ended, name = one.started, one.started + one.startup_seconds, one.worker
    for other in near:
        if other.started < ended and begun < other.started + other.startup_seconds and other.worker != name:
            return True
    return False


def queue_wait(beats: Iterable[Beat], job_kind: str) -> Spread | None:
    """Return how long workers of a kind wait in the queue."""
    return _spread(beat.queued_seconds for beat in _newest(beats, job_kind))


def coming_back(beats: Sequence[Beat], job_kind: str) -> float | None:
    """Return how long it takes until a worker of a kind is there that is not: in the queue, and to start.
    None if none has started up yet."""
    loading, queue = startup(beats, job_kind), queue_wait(beats, job_kind)
    if loading is None:
        return None
    return loading.median + (queue.mean if queue else 0.0)


def task_seconds(beats: Iterable[Beat], job_kind: str) -> float | None:
    """Return how long a task of a kind takes, by the median worker."""
    means = _spread(
        beat.busy_seconds / beat.tasks if beat.tasks else None for beat in _newest(beats, job_kind)
    )
    return None if means is None else means.median


def _newest(beats: Iterable[Beat], job_kind: str) -> list[Beat]:
    mine = sorted([beat for beat in beats if beat.job_kind == job_kind], key=attrgetter("started"))
    return mine[-2 * _RECENT :]


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    late = known[min(int(_LATE * len(known)), len(known) - 1)]
    return Spread(statistics.median(known), late, known[0], statistics.fmean(known))
