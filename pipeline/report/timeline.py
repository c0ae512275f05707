"""When and where every attempt waited and ran, as rows for the script that draws them, and where the time
went: by stage, a table and a stacked bar; of workers, and why they left.

Newest iterations attempt by attempt, all of them as one bar for each stage; the reader chooses the window.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.job_kinds import DRIVER, GUARD
from pipeline.metrics.spans import IterationSpans, Span, SpanEnd, StageTime, stage_totals, total
from pipeline.report.data import ReportData
from pipeline.report.figures import AXIS, layout
from pipeline.report.html import Head
from pipeline.run.directory import Run
from pipeline.run.tasks import Stage, task_of
from pipeline.text import MISSING, duration
from pipeline.workers.beats import Beat
from pipeline.workers.summary import REASONS, WorkersOf, workers_of

_WINDOW = 100
"""Iterations that a window of stages shows."""
_NEWEST = 3
_MOST_AT_ONCE = 1500
"""Most attempts in the first window, which holds as many of the newest iterations as fit."""


def windows_of(spans: Mapping[int, IterationSpans]) -> dict[str, list[tuple[str, str]]]:
    """Return groups of (value, words); none where nothing was ever tried.

    A value says what is drawn, and from which iteration to which.
    """
    if not spans:
        return {}
    groups: dict[str, list[tuple[str, str]]] = {}
    if detailed := [iteration for iteration, of_iteration in spans.items() if of_iteration.attempts]:
        newest = _newest(spans, detailed)
        several = [(f"attempts:{newest[0]}:{newest[-1]}", f"newest, {newest[0]} to {newest[-1]}")]
        single = [(f"attempts:{i}:{i}", f"iteration {i}") for i in reversed(detailed)]
        groups["Every attempt"] = [*(several if len(newest) > 1 else []), *single]
    first, last = min(spans), max(spans)
    parts = [(max(end - _WINDOW + 1, first), end) for end in range(last, first - 1, -_WINDOW)]
    groups["Stages"] = [(f"stages:{a}:{b}", f"iterations {a} to {b}") for a, b in parts]
    return groups


def _newest(spans: Mapping[int, IterationSpans], detailed: Sequence[int]) -> list[int]:
    """Find the newest iterations that can be drawn together."""
    kept: list[int] = []
    count = 0
    for iteration in reversed(detailed[-_NEWEST:]):
        count += len(spans[iteration].attempts)
        if kept and count > _MOST_AT_ONCE:
            break
        kept.append(iteration)
    return kept[::-1]


def timeline_data(data: ReportData) -> dict[str, Any]:
    """Return the script's data: times are seconds since ``base``, names are places in ``names``."""
    stages = [(i, job_kind, s) for i, found in data.spans.items() for job_kind, s in found.stages.items()]
    attempts = [(i, span) for i, found in data.spans.items() for span in found.attempts]
    times = [time for _, _, stage in stages for time in (stage.ready, stage.started) if time is not None]
    base = min(times, default=data.run.identity.created)
    job_kinds = job_kinds_of(data)
    lanes = (stage.lane for _, _, stage in stages)
    names = list(dict.fromkeys([*lanes, *(name for _, span in attempts for name in (span.lane, span.node))]))
    place = {name: index for index, name in enumerate(names)}
    return {
        "base": base,
        "now": round(data.now - base, 2),
        "names": names,
        "purposes": job_kinds,
        "colours": [colour_of(job_kind, job_kinds) for job_kind in job_kinds],
        "attempts": [_attempt(data.run, i, span, base, place, job_kinds) for i, span in attempts],
        "stages": [
            [i, job_kinds.index(job_kind), place[stage.lane]]
            + [_since(time, base) for time in (stage.ready, stage.started, stage.ended)]
            + [stage.attempts, stage.failed]
            for i, job_kind, stage in stages
        ],
    }


def job_kinds_of(data: ReportData) -> list[str]:
    """Return the job kinds that ran, in the order of the pipeline."""
    found = {job_kind for of_iteration in data.spans.values() for job_kind in of_iteration.stages}
    order = (Stage.PREPARE, *data.run.plan.job_kinds, Stage.EVALUATE, DRIVER)
    known = [str(job_kind) for job_kind in order if job_kind in found]
    return [*known, *sorted(found - set(known))]


def colour_of(job_kind: str, job_kinds: Sequence[str]) -> int:
    """Choose a colour of the style sheet: a stage has the same one in every chart, and pools follow."""
    usual: dict[str, int] = {Stage.ROLLOUT: 0, Stage.REWARD: 1, Stage.UPDATE: 2, Stage.EVALUATE: 3}
    if job_kind in usual:
        return usual[job_kind]
    pools = [other for other in job_kinds if other.startswith(f"{Stage.SCORE}-")]
    return 4 + pools.index(job_kind) % 2 if job_kind in pools else 5


def _attempt(
    run: Run, iteration: int, span: Span, base: float, place: Mapping[str, int], job_kinds: Sequence[str]
) -> list[Any]:
    times = (span.ready, span.started, span.ended)
    return [
        iteration,
        job_kinds.index(span.job_kind),
        place[span.lane],
        span.shard,
        span.attempt,
        *(_since(time, base) for time in times),
        place[span.node],
        span.job,
        list(SpanEnd).index(span.end),
        span.note[:300],
        log_of(run, iteration, span),
        _since(span.held, base),
    ]


def _since(time: float | None, base: float) -> float | None:
    return None if time is None else round(time - base, 2)


def log_of(run: Run, iteration: int, span: Span) -> str:
    """Return the path of an attempt's log, relative to the run directory."""
    if span.job_kind == DRIVER:
        kind, of_iteration, number = span.attempt.split("-")
        folder = run.paths.log_root / f"{int(of_iteration):05d}-{kind}" / f"attempt-{number}"
        path = (run.paths.log_root / GUARD if kind == GUARD else folder) / f"{kind}.log"
    else:
        task = task_of(iteration, span.job_kind, span.shard)
        path = run.paths.task(task).log(span.number)
    return run.paths.relative(path)


# --- where the time went ---------------------------------------------------------------------------------

PARTS: Mapping[str, tuple[str, str]] = {
    "queue": ("waited in the queue", "var(--axis)"),
    "startup": ("start-up", "var(--c4)"),
    "compute": ("model compute", "var(--c2)"),
    "idle": ("idle", "var(--c3)"),
    "retry": ("without a result", "var(--bad)"),
    "waiting": ("workers waited for inputs", "var(--c5)"),
}
"""Name and colour of each part of a bar."""


@dataclass(frozen=True)
class UsageTable:
    """Everything about the iterations from ``first`` to ``last``, summed over attempts."""

    first: int
    last: int
    heads: Sequence[Head]
    rows: Sequence[Sequence[str]]
    figure: dict[str, Any]


def usage(data: ReportData) -> UsageTable | None:
    """Sum up by stage; None where nothing ran. Hours and partitions are left out where there are none."""
    found = stage_totals(data.spans.values())
    stages = {job_kind: found[job_kind] for job_kind in job_kinds_of(data) if found[job_kind].attempts}
    if not stages:
        return None
    hidden = set() if any(stage.cpu_hours for stage in stages.values()) else {"GPU hours", "CPU hours"}
    hidden |= set() if any(stage.waiting for stage in stages.values()) else {"workers waited"}
    hidden |= {"partition"} if all(stage.lane == job_kind for job_kind, stage in stages.items()) else set()
    columns = [column for column in _COLUMNS if column[0].title not in hidden]
    lines = (*stages.items(), ("all", total(stages.values())))
    rows = [[cell(*line) for _, cell in columns] for line in lines]
    return UsageTable(min(data.spans), max(data.spans), [head for head, _ in columns], rows, _figure(stages))


def _share(title: str, part: str) -> tuple[Head, Callable[[str, StageTime], str]]:
    """Make a column of shares; driver jobs, which only wait and run, have none."""

    def cell(job_kind: str, stage: StageTime) -> str:
        is_known = stage.run and job_kind != DRIVER
        return f"{100 * getattr(stage, part) / stage.run:.1f} %" if is_known else MISSING

    return Head(title, "share of the time that its jobs ran"), cell


_COLUMNS: tuple[tuple[Head, Callable[[str, StageTime], str]], ...] = (
    (Head("stage"), lambda job_kind, stage: job_kind),
    (Head("partition", "where most of it ran"), lambda job_kind, stage: stage.lane),
    (Head("attempts", "that started"), lambda job_kind, stage: str(stage.attempts)),
    (Head("failed", "attempts that ended without a result"), lambda job_kind, stage: str(stage.failed)),
    (Head("waited", "sum over attempts"), lambda job_kind, stage: duration(stage.queue)),
    (Head("ran", "sum over attempts"), lambda job_kind, stage: duration(stage.run)),
    _share("start-up", "startup"),
    _share("compute", "compute"),
    _share("idle", "idle"),
    _share("no result", "retry"),
    (
        Head("workers waited", "for inputs, with their resources held; not in what ran"),
        lambda job_kind, stage: duration(stage.waiting),
    ),
    (
        Head("waited/ran", "seconds in the queue for each second that it ran"),
        lambda job_kind, stage: f"{stage.queue / stage.run:.2f}" if stage.run else MISSING,
    ),
    (Head("GPU hours", "as Slurm accounts for them"), lambda job_kind, stage: f"{stage.gpu_hours:.2f}"),
    (Head("CPU hours", "as Slurm accounts for them"), lambda job_kind, stage: f"{stage.cpu_hours:.2f}"),
)


def _figure(stages: Mapping[str, StageTime]) -> dict[str, Any]:
    """Draw stacked bars, one per stage, in the largest unit in which the longest has at least two."""
    tasks = {job_kind: stage for job_kind, stage in stages.items() if job_kind != DRIVER}
    longest = max((stage.queue + stage.run + stage.waiting for stage in tasks.values()), default=0.0)
    unit, size = ("hours", 3600) if longest >= 7200 else ("minutes", 60) if longest >= 120 else ("seconds", 1)
    parts = [part for part in PARTS if part != "waiting" or any(stage.waiting for stage in tasks.values())]
    traces = [_trace(part, tasks, size) for part in parts]
    title = {"text": f"{unit}, summed over attempts", "standoff": 8, "font": {"size": 12}}
    shape = layout(
        height=110 + 34 * len(tasks),
        margin={"l": 70, "r": 12, "t": 12, "b": 44},
        bargap=0.3,
        xaxis={**AXIS, "title": title, "rangemode": "tozero", "nticks": 8},
        yaxis={**AXIS, "autorange": "reversed", "type": "category"},
        hovermode="closest",
    )
    return {"data": traces, "layout": shape}


def _trace(part: str, stages: Mapping[str, StageTime], size: int) -> dict[str, Any]:
    values = [getattr(stage, part) for stage in stages.values()]
    name, colour = PARTS[part]
    marker: dict[str, Any] = {"color": colour, "line": {"width": 0}}
    if part in ("queue", "waiting"):
        marker["pattern"] = {"shape": "/", "size": 6, "solidity": 0.25, "fillmode": "replace"}
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(stages),
        "x": [round(value / size, 4) for value in values],
        "text": [duration(value) for value in values],
        "textposition": "none",
        "hovertemplate": f"%{{y}}, {name}: %{{text}}<extra></extra>",
        "marker": marker,
    }


# --- workers ---------------------------------------------------------------------------------------------


_WORKER_HEADS = (
    Head("stage"),
    Head("workers", "jobs that stayed, or that waited for their first task"),
    Head("without a task", "that left without having done one"),
    Head("evicted", "that left because another job needed the place"),
    Head("tasks", "that they have committed"),
    Head("start-up", "before their first task"),
    Head("busy"),
    Head("waited", "for inputs, with their resources held"),
    Head("idle", "share of their time that they waited"),
)


@dataclass(frozen=True)
class WorkersTable:
    """What the newest workers said last."""

    heads: Sequence[Head]
    rows: Sequence[Sequence[str]]
    why: Sequence[tuple[str, str]]
    """By job kind, why its workers left, and how many."""
    is_cut: bool
    """Whether there may have been earlier ones, of which nothing is kept."""


def workers_table(beats: Sequence[Beat], now: float) -> WorkersTable | None:
    """Sum up by job kind; None where no job stayed."""
    if not beats:
        return None
    counted = workers_of(beats, now)
    return WorkersTable(
        _WORKER_HEADS, [_workers_row(one) for one in counted], list(_why(counted)), counted[0].is_cut
    )


def _workers_row(workers: WorkersOf) -> list[str]:
    spent = workers.spent
    counts = (workers.starts, workers.without_task, workers.evicted, workers.tasks)
    times = (spent.startup, spent.busy, spent.waiting)
    return [workers.job_kind, *map(str, counts), *map(duration, times), f"{100 * spent.idle_share:.1f} %"]


def _why(counted: Sequence[WorkersOf]) -> Iterator[tuple[str, str]]:
    for one in counted:
        if one.left:
            message = _reasons_in_words(one.reasons)
            idle = f". Without a task: {_reasons_in_words(one.without_task_reasons)}"
            yield one.job_kind, message + idle * bool(one.without_task)


def _reasons_in_words(reasons: Mapping[str, int]) -> str:
    """Say why workers left, e.g. ``12: nothing was left to do; 3: its memory grew``."""
    known = {str(reason): words for reason, words in REASONS.items()}
    return "; ".join(f"{count}: {known.get(reason, 'did not say why')}" for reason, count in reasons.items())
