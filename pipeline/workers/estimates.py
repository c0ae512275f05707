"""What to expect: when a task's inputs will be there, how long a start and the queue take. Pure.

From what earlier iterations and workers took: medians, and None where nothing is known. Nothing here decides
about results; a wrong estimate costs time.
"""

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.run.plan import Plan
from pipeline.run.tasks import Task
from pipeline.workers.beats import Beat

_RECENT = 8
"""Iterations of which a median is taken: enough for a steady one, few enough to follow a change."""
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


@dataclass(frozen=True)
class Spread:
    """Seconds that something took."""

    median: float
    late: float
    """Longer than in four of five cases."""


def passages(lines: Iterable[Mapping[str, Any]]) -> list[Passage]:
    """Read passages from lines of ``spans.jsonl`` (:mod:`pipeline.metrics.spans`); what is no such line, or
    lacks a time, is left out."""
    found: dict[tuple[int, str], Passage] = {}
    for line in lines:
        stages, iteration = line.get("stages"), line.get("iteration")
        if isinstance(stages, dict) and isinstance(iteration, int):
            for job_kind, stage in stages.items():
                if (seconds := _seconds(stage, "ready")) is not None:
                    at_work = _seconds(stage, "started")
                    found[iteration, job_kind] = Passage(
                        iteration, job_kind, seconds, seconds if at_work is None else min(at_work, seconds)
                    )
    return list(found.values())


def _seconds(stage: Any, since: str) -> float | None:
    begun, ended = (stage.get(since), stage.get("ended")) if isinstance(stage, dict) else (None, None)
    if not isinstance(begun, int | float) or not isinstance(ended, int | float):
        return None
    return max(0.0, float(ended) - float(begun))


def turnaround(
    seen: Iterable[Passage], job_kind: str, at_best: bool = False, is_early: bool = False
) -> float | None:
    """Return the median of the last passages through a stage, in seconds.

    Args:
        at_best: return the shortest instead, without what its tasks waited for jobs to start. What somebody
            would not wait for even so is far away. Past waits do not count for that: who leaves for
            them makes others wait, who then leave for that.
        is_early: whether its jobs start early, so that tasks do not wait for them. Those that once did say
            nothing of the next: who comes later for them makes others wait, and is late again.
    """
    mine = sorted((p for p in seen if p.job_kind == job_kind), key=lambda passage: passage.iteration)
    if not mine:
        return None
    newest = mine[-_RECENT:]
    if at_best:
        return min(passage.at_work for passage in newest)
    return statistics.median(passage.at_work if is_early else passage.seconds for passage in newest)


def expected_ready(
    plan: Plan,
    task: Task,
    committed_at: Callable[[Task], float | None],
    seen: Sequence[Passage],
    now: float,
    at_best: bool = False,
    early: Collection[str] = (),
) -> float | None:
    """Return when the inputs of a task are expected to be there (unix time), or were; None if unknown.

    Each stage that is not done takes as long as in earlier iterations, from when its own inputs are there;
    one that has taken longer already is expected now.

    Args:
        committed_at: returns when a task was committed, None if it is not.
        at_best: expect each stage to be as quick as :func:`turnaround` says of the best.
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
        seconds, begun = turnaround(seen, task.job_kind, at_best, task.job_kind in early), ready(task)
        return None if seconds is None or begun is None else max(now, begun + seconds)

    return ready(task)


def _one_of_each(tasks: Iterable[Task], committed_at: Callable[[Task], float | None]) -> Iterable[Task]:
    """Return one task of each kind and iteration, one that is not committed if there is any."""
    found: dict[tuple[int, str], Task] = {}
    for task in tasks:
        key = task.iteration, task.job_kind
        if key not in found or (committed_at(found[key]) is not None and committed_at(task) is None):
            found[key] = task
    return found.values()


def startup(beats: Iterable[Beat], job_kind: str) -> Spread | None:
    """Return how long workers of a kind take from their start until they can begin with a task."""
    return _spread(beat.startup_seconds or None for beat in _newest(beats, job_kind))


def queue_wait(beats: Iterable[Beat], job_kind: str) -> Spread | None:
    """Return how long workers of a kind wait in the queue."""
    return _spread(beat.queued_seconds for beat in _newest(beats, job_kind))


def coming_back(beats: Sequence[Beat], job_kind: str) -> float | None:
    """Return how long it takes until a worker of a kind is there that is not: in the queue, and to start."""
    known = startup(beats, job_kind), queue_wait(beats, job_kind)
    return None if known == (None, None) else sum(spread.median for spread in known if spread is not None)


def task_seconds(beats: Iterable[Beat], job_kind: str) -> float | None:
    """Return how long a task of a kind takes, by the median worker."""
    means = _spread(
        beat.busy_seconds / beat.tasks if beat.tasks else None for beat in _newest(beats, job_kind)
    )
    return None if means is None else means.median


def _newest(beats: Iterable[Beat], job_kind: str) -> list[Beat]:
    mine = sorted((beat for beat in beats if beat.job_kind == job_kind), key=lambda beat: beat.started)
    return mine[-2 * _RECENT :]


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return Spread(statistics.median(known), known[min(int(_LATE * len(known)), len(known) - 1)])
