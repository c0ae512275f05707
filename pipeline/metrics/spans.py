"""When and where every attempt waited and ran: lines of ``spans.jsonl``, one for each iteration. Pure.

A line has the sums of each stage over all attempts, and the attempts themselves, thinned where an iteration
has thousands, so that the file stays readable however long the run is.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any

from pipeline.config.job_kinds import DRIVER
from pipeline.run.attempts import AttemptId

_MOST_ATTEMPTS = 400
"""Attempts of a stage that a line lists one by one."""
_DIGITS = 2
"""Decimals of seconds: sacct knows whole ones, and a bar of ten milliseconds is narrower than a pixel."""


class SpanEnd(StrEnum):
    """Outcome of an attempt."""

    COMMITTED = "committed"
    """Success: its result is the task's."""
    FAILED = "failed"
    """No result: it failed, was killed, preempted or requeued."""
    ENDED = "ended"
    """No failure, and no result that counts: a driver job, or another attempt was first, or all jobs of the
    run were cancelled."""
    OPEN = "open"
    """No end yet when observed: it waits or runs."""


@dataclass(frozen=True)
class Span:
    """One attempt at a task, or one driver job. Times are unix seconds; None if unknown."""

    job_kind: str
    """Job kind of the task, or ``driver``."""
    shard: int
    attempt: str
    """The attempt's id; of a driver job its kind and number."""
    end: SpanEnd
    ready: float | None = None
    """Time from which only the scheduler kept it from starting: inputs committed."""
    started: float | None = None
    computing: float | None = None
    """Start of its model's compute; where no model computes, of the task's own code."""
    ended: float | None = None
    compute: float = 0.0
    """Seconds of model compute."""
    node: str = ""
    lane: str = ""
    """Partition; for runs on one machine, the job kind."""
    job: str = ""
    note: str = ""
    """Reason for which it failed."""
    cpus: int = 0
    gpus: int = 0
    """GPUs held; 0, as ``cpus``, where accounting does not say."""
    held: float | None = None
    """Time from which a worker held its resources and waited for this task; None for a job of one task."""
    begun: float = 0.0
    """Seconds from the start of a worker's job until it could begin with this task, which is its first."""

    @property
    def number(self) -> int:
        """Number of the attempt at its task; names the folder of its log."""
        return AttemptId.parse(self.attempt).number

    @property
    def seconds(self) -> float | None:
        """Seconds from its start to its end; None while one of them is unknown."""
        return None if self.started is None or self.ended is None else self.ended - self.started

    @property
    def is_wasted(self) -> bool:
        """Whether it is over and left no result, though it was at a task or failed."""
        return self.end is SpanEnd.FAILED or (self.end is SpanEnd.ENDED and self.job_kind != DRIVER)


@dataclass(frozen=True)
class StageTime:
    """Sums over the attempts of a stage of an iteration (or a pool's scores, or driver jobs), in seconds.

    ``run`` is ``startup + compute + idle + retry`` for tasks; driver jobs only wait and run.
    """

    lane: str = ""
    attempts: int = 0
    """Attempts that started."""
    failed: int = 0
    ready: float | None = None
    """Unix time at which the first attempt could have started."""
    started: float | None = None
    """Unix time of the first start."""
    ended: float | None = None
    """Unix time of the last end."""
    queue: float = 0.0
    """Seconds from ready to started."""
    run: float = 0.0
    """Seconds from started to ended, of every attempt that has ended."""
    startup: float = 0.0
    """Seconds of committed attempts from the job's start to the first model compute."""
    compute: float = 0.0
    """Seconds of committed attempts in which a model computed."""
    idle: float = 0.0
    """Seconds of committed attempts spent neither starting up nor computing (I/O, hashing, rules, exit)."""
    retry: float = 0.0
    """Seconds of attempts without a result that counts."""
    gpu_hours: float = 0.0
    """Hours of GPUs held: for ``run`` and ``waiting``, and while workers started up for these tasks."""
    cpu_hours: float = 0.0
    wasted_gpu_hours: float = 0.0
    """Part of them of attempts that are over without a result."""
    wasted_cpu_hours: float = 0.0
    waiting: float = 0.0
    """Seconds in which workers held their resources and waited for these tasks; not in ``run``."""

    def plus(self, other: "StageTime") -> "StageTime":
        """Add up the sums of both; lane and times stay those of this one."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in _SUMS})


_SUMS = [f.name for f in fields(StageTime) if f.name not in ("lane", "ready", "started", "ended")]


@dataclass(frozen=True)
class IterationSpans:
    """A line of ``spans.jsonl``."""

    iteration: int
    stages: Mapping[str, StageTime]
    """Sums by job kind, in the order in which they began."""
    attempts: tuple[Span, ...] = ()
    left_out: int = 0
    """Attempts that are in the sums and not in ``attempts``."""
    written: float = 0.0
    """Unix time at which the line was made. A driver job is in the first line after its end."""


def parts_of(span: Span) -> StageTime:
    """Split an attempt's time, with what it held meanwhile. Unknown parts count as 0."""
    queue = max(0.0, span.started - span.ready) if span.started and span.ready else 0.0
    waiting = max(0.0, span.started - span.held) if span.started and span.held else 0.0
    run = max(0.0, span.seconds or 0.0)
    hours = (run + waiting + span.begun) / 3600
    wasted = hours * span.is_wasted
    startup, compute, idle, retry = _parts_of_run(span, run)
    return StageTime(
        attempts=int(span.started is not None),
        failed=int(span.end is SpanEnd.FAILED),
        queue=queue,
        run=run,
        startup=startup,
        compute=compute,
        idle=idle,
        retry=retry,
        gpu_hours=span.gpus * hours,
        cpu_hours=span.cpus * hours,
        wasted_gpu_hours=span.gpus * wasted,
        wasted_cpu_hours=span.cpus * wasted,
        waiting=waiting,
    )


def _parts_of_run(span: Span, run: float) -> tuple[float, float, float, float]:
    """Return seconds of start-up, of compute, idle, and without a result that counts."""
    if span.job_kind == DRIVER or span.started is None:
        return 0.0, 0.0, 0.0, 0.0
    if span.end is not SpanEnd.COMMITTED:
        return 0.0, 0.0, 0.0, run
    startup = min(max(0.0, (span.computing or span.started) - span.started), run)
    compute = min(span.compute, run - startup)
    return startup, compute, run - startup - compute, 0.0


def stage_times(spans: Iterable[Span]) -> dict[str, StageTime]:
    """Sum spans by job kind."""
    return {job_kind: stage_time(group) for job_kind, group in _by_job_kind(spans).items()}


def _by_job_kind(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Group spans, in the order of starts."""
    groups: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda s: s.started or s.ready or 0.0):
        groups.setdefault(span.job_kind, []).append(span)
    return groups


def stage_time(spans: Sequence[Span]) -> StageTime:
    """Sum up spans, of which there is at least one."""
    parts = [parts_of(span) for span in spans]
    return StageTime(
        lane=Counter(span.lane for span in spans).most_common(1)[0][0],
        ready=min((span.ready for span in spans if span.ready is not None), default=None),
        started=min((span.started for span in spans if span.started is not None), default=None),
        ended=max((span.ended for span in spans if span.ended is not None), default=None),
        **{name: sum(getattr(part, name) for part in parts) for name in _SUMS},
    )


def iteration_spans(iteration: int, spans: Sequence[Span], written: float = 0.0) -> IterationSpans:
    """Make an iteration's line: the sums of all spans, and the spans, thinned."""
    groups = _by_job_kind(sorted(spans, key=lambda span: span.shard))
    kept = tuple(span for group in groups.values() for span in _some(group))
    return IterationSpans(iteration, stage_times(spans), kept, len(spans) - len(kept), written)


def _some(spans: Sequence[Span]) -> list[Span]:
    """Keep failures, the last to end, and evenly chosen others, in the order of starts."""
    if len(spans) <= _MOST_ATTEMPTS:
        return list(spans)
    failed = [i for i, span in enumerate(spans) if span.end is SpanEnd.FAILED][: _MOST_ATTEMPTS // 2]
    last = max(range(len(spans)), key=lambda i: spans[i].ended or 0.0)
    room = _MOST_ATTEMPTS - len(failed) - 1
    evenly = (i * len(spans) // room for i in range(room))
    return [spans[i] for i in sorted({*failed, *evenly, last})]


def total(stages: Iterable[StageTime]) -> StageTime:
    """Add up stages; zeros for none."""
    return functools.reduce(StageTime.plus, stages, StageTime())


# --- lines ---------------------------------------------------------------------------------------------


def to_line(spans: IterationSpans) -> dict[str, Any]:
    """Format a line of ``spans.jsonl``: the fields of :class:`IterationSpans` by name.

    ``attempts`` holds, for each field of :class:`Span`, the list of its values: a report parses the lines of
    all iterations, and objects, one per attempt, take twice as long.
    """
    columns = {f.name: [getattr(span, f.name) for span in spans.attempts] for f in fields(Span)}
    return {
        "iteration": spans.iteration,
        "written": spans.written,
        "left_out": spans.left_out,
        "stages": {job_kind: _stage_line(stage) for job_kind, stage in spans.stages.items()},
        "attempts": {name: [_rounded(v, _DIGITS) for v in values] for name, values in columns.items()},
    }


def _stage_line(stage: StageTime) -> dict[str, Any]:
    """Round a stage's numbers, hours to more digits than seconds: a run adds up a thousand of them."""
    return {name: _rounded(value, 8 if "_hours" in name else 4) for name, value in asdict(stage).items()}


def _rounded(value: Any, digits: int) -> Any:
    return round(value, digits) if isinstance(value, float) else value


_NO_LINE = (KeyError, TypeError, ValueError, IndexError, AttributeError)


def from_line(line: Mapping[str, Any], with_attempts: bool = True) -> IterationSpans:
    """Invert :func:`to_line`. On anything else raises one of the errors of :data:`_NO_LINE`."""
    stages = {job_kind: StageTime(**stage) for job_kind, stage in line["stages"].items()}
    columns = line["attempts"] | {"end": map(SpanEnd, line["attempts"]["end"])}
    rows = zip(*columns.values(), strict=True) if with_attempts else ()
    attempts = tuple(Span(**dict(zip(columns, row, strict=True))) for row in rows)
    return IterationSpans(int(line["iteration"]), stages, attempts, line["left_out"], line["written"])


def stage_totals(iterations: Iterable[IterationSpans]) -> dict[str, StageTime]:
    """Sum stage times over iterations, by job kind."""
    found: dict[str, StageTime] = {}
    for spans in iterations:
        for job_kind, stage in spans.stages.items():
            found[job_kind] = found.get(job_kind, StageTime(stage.lane)).plus(stage)
    return found


def read_lines(lines: Iterable[Mapping[str, Any]], newest: int, detailed: int) -> dict[int, IterationSpans]:
    """Parse the last line of each iteration up to ``newest``; the last ``detailed`` with their attempts.

    Malformed lines are left out.
    """
    by_iteration: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        if isinstance(line.get("iteration"), int) and line["iteration"] <= newest:
            by_iteration[line["iteration"]] = line
    found: dict[int, IterationSpans] = {}
    for iteration in sorted(by_iteration):
        try:
            found[iteration] = from_line(by_iteration[iteration], iteration > newest - detailed)
        except _NO_LINE:
            continue
    return found
