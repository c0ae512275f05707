"""When a task's inputs will be there, by what earlier iterations took to pass through the stages. Pure.

A stage's passage counts from when all of its inputs are there: what it does while the stage before goes on
takes no time of its own. A stage whose tasks each wait for one task of the stage before, as rewards do,
begins with the first result of that, and the update with the last. With staleness a stage may have the inputs
of an iteration while it still works on the one before: waiting for itself is no part of a passage either.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.run.plan import Plan, policy_maker
from pipeline.run.tasks import Task, is_sharded

_RECENT = 8
"""Iterations of which a median is taken: enough for a steady one, few enough to follow a change."""
_COMMITTED = "committed"
"""What spans say of an attempt that won; stages, which read them by this module, import no metrics."""


@dataclass(frozen=True)
class Took:
    """Seconds until a result of a stage was there."""

    seconds: float
    """From its inputs being there."""
    at_work: float
    """From then on, or from the first start of one of its tasks if that is later."""
    warm: float
    """Part of ``at_work`` during which a task had finished loading: the duration where processes stay."""


@dataclass(frozen=True)
class Passage:
    """One iteration's passage through a stage (or a pool's scores)."""

    iteration: int
    job_kind: str
    last: Took
    """Until the last result, from when all inputs were there."""
    first: Took
    """Until the first result, from when the first input was there."""
    ended: float | None = None
    """Unix time of the last result; None if unknown."""


@dataclass(frozen=True)
class _Done:
    """A committed attempt: unix times."""

    ready: float
    computing: float
    ended: float


def passages(lines: Iterable[Mapping[str, Any]]) -> list[Passage]:
    """Read passages from lines of ``spans.jsonl`` (:mod:`pipeline.metrics.spans`); what is no such line, or
    lacks a time, is left out."""
    found: dict[tuple[int, str], Passage] = {}
    for line in lines:
        stages, iteration = line.get("stages"), line.get("iteration")
        if isinstance(stages, dict) and isinstance(iteration, int):
            for job_kind, stage in stages.items():
                done = _committed(line.get("attempts"), job_kind)
                before = found.get((iteration - 1, job_kind)) if is_sharded(job_kind) else None
                if (took := _took(stage, done, before)) is not None:
                    found[iteration, job_kind] = Passage(iteration, job_kind, *took, _number(stage, "ended"))
    return list(found.values())


def _took(stage: Any, done: Sequence[_Done], before: Passage | None) -> tuple[Took, Took] | None:
    """Return what a stage took until its last and until its first result.

    Args:
        before: the same stage in the iteration before, after which it can begin.
    """
    ready, started, ended = (_number(stage, name) for name in ("ready", "started", "ended"))
    if ready is None or ended is None:
        return None
    free = before.ended if before and before.ended is not None and before.ended < ended else ready
    if free > ready:
        ready, done = free, [replace(one, ready=max(one.ready, free)) for one in done]
    begun = ready if started is None else max(ready, started)
    if not done:
        whole = _between(ready, begun, ended, warm=math.inf)
        return whole, whole
    complete, first = max(one.ready for one in done), min(done, key=lambda one: one.ended)
    late = [(max(one.computing, complete), max(one.ended, complete)) for one in done]
    return (
        _between(complete, max(begun, complete), ended, _covered(late)),
        _between(ready, begun, first.ended, first.ended - first.computing),
    )


def _between(ready: float, begun: float, ended: float, warm: float) -> Took:
    seconds, at_work = max(0.0, ended - ready), max(0.0, ended - begun)
    return Took(seconds, at_work, min(at_work, max(0.0, warm)))


def _number(stage: Any, name: str) -> float | None:
    value = stage.get(name) if isinstance(stage, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _committed(columns: Any, job_kind: str) -> list[_Done]:
    """Return a kind's committed attempts; nothing of what has no such columns."""
    if not isinstance(columns, dict):
        return []
    known = [columns.get(name) for name in ("job_kind", "end", "ready", "computing", "ended")]
    if not all(isinstance(column, list) for column in known):
        return []
    rows = zip(*(column or () for column in known), strict=False)
    won = (times for kind, end, *times in rows if (kind, end) == (job_kind, _COMMITTED))
    return [_Done(*times) for times in won if all(isinstance(time, int | float) for time in times)]


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def turnaround(
    seen: Iterable[Passage],
    job_kind: str,
    staying: Collection[str] | None = None,
    is_early: bool = False,
    of_first: bool = False,
) -> float | None:
    """Return the median of the last passages through a stage, in seconds.

    Args:
        staying: job kinds of which processes stay if that pays. Return the shortest passage instead, without
            what its tasks waited for jobs to start, and without their loading if processes of its kind stay.
            What is not worth waiting for even so is far away. Past waits and loading do not count for
            that: a worker that leaves for them makes others wait, which then leave for that.
        is_early: whether its jobs start early, so that tasks do not wait for them. Those that once did say
            nothing of the next: a worker that comes later for them makes others wait, and is late again.
        of_first: until its first result, not its last.
    """
    mine = sorted((p for p in seen if p.job_kind == job_kind), key=lambda passage: passage.iteration)
    newest = [passage.first if of_first else passage.last for passage in mine[-_RECENT:]]
    if not newest:
        return None
    if staying is None:
        return statistics.median(took.at_work if is_early else took.seconds for took in newest)
    return min(took.warm if job_kind in staying else took.at_work for took in newest)


def expected_ready(
    plan: Plan,
    task: Task,
    committed_at: Callable[[Task], float | None],
    seen: Sequence[Passage],
    now: float,
    staying: Collection[str] | None = None,
    early: Collection[str] = (),
    of_first: bool = True,
) -> float | None:
    """Return when a worker of a task's kind is expected to have its next input, or had it (unix time); None
    if unknown.

    Args:
        committed_at: returns when a task was committed, None if it is not.
        staying: job kinds of which processes stay: expect each stage to be as quick as :func:`turnaround`
            says of the best.
        early: job kinds whose jobs start early.
        of_first: of a stage whose tasks wait for one task each, when the first of these is done; else when
            all are.
    """
    return _Forecast(plan, committed_at, seen, now, staying, early).inputs_of(task, of_first)


@dataclass(frozen=True)
class _Forecast:
    """Arguments of :func:`expected_ready`, but for the task."""

    plan: Plan
    committed_at: Callable[[Task], float | None]
    seen: Sequence[Passage]
    now: float
    staying: Collection[str] | None
    early: Collection[str]
    known: dict[tuple[Task, bool], float | None] = field(default_factory=dict)
    """Results that were expected before: those of a stage are asked for by all that read them."""

    def inputs_of(self, task: Task, of_first: bool) -> float | None:
        """Return when a task's inputs are there.

        Args:
            of_first: whether any task of its stage will do: where each waits for one task, for the first
                whose input comes.
        """
        times = []
        for alike in self.plan.alike_inputs(task):
            source = next((one for one in alike if self.committed_at(one) is None), alike[0])
            is_streamed = of_first and task.stage.is_sharded and source.stage.is_sharded
            at = self.committed_at(source)
            times.append(self._result_of(source, is_streamed) if at is None else at)
        known = [time for time in times if time is not None]
        return max(known, default=self.now) if len(known) == len(times) else None

    def _result_of(self, task: Task, of_first: bool) -> float | None:
        """Return when the first or the last result of a task's stage is there: after as long as in earlier
        iterations, from when its own inputs are. One that has taken longer already is expected now."""
        key = task, of_first
        if key not in self.known:
            kind = task.job_kind
            seconds = turnaround(self.seen, kind, self.staying, kind in self.early, of_first)
            begun = self._begin_of(task, of_first) if seconds is not None else None
            is_unknown = seconds is None or begun is None
            self.known[key] = None if is_unknown else max(self.now, (begun or 0.0) + (seconds or 0.0))
        return self.known[key]

    def _begin_of(self, task: Task, of_first: bool) -> float | None:
        """Return when a stage can begin with an iteration: once its inputs are there, and with staleness once
        it has done the iteration before."""
        inputs = self.inputs_of(task, of_first)
        if inputs is None or not (self.plan.staleness and task.stage.is_sharded):
            return inputs
        before = task.iteration - 1
        if before <= self.plan.start:
            return inputs
        kind = task.job_kind
        own = next((p.ended for p in self.seen if (p.iteration, p.job_kind) == (before, kind)), None)
        if own is None:  # its row is not written yet
            own = self._end_of(before, kind)
        return inputs if own is None else max(inputs, own)

    def _end_of(self, iteration: int, job_kind: str) -> float | None:
        """Return when a stage is done with an iteration, or was; None if its records are not known."""
        tasks = [one for one in self.plan.tasks(iteration) if one.job_kind == job_kind]
        times = [self.committed_at(one) for one in tasks]
        undone = next((one for one, time in zip(tasks, times, strict=True) if time is None), None)
        if undone is None:
            return max(time for time in times if time is not None)
        is_over = self.committed_at(policy_maker(iteration)) is not None
        return None if is_over else self._result_of(undone, of_first=False)
