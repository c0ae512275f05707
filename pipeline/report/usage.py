"""Where the jobs' time went, by stage: a table and a stacked bar."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config.job_kinds import DRIVER
from pipeline.metrics.spans import StageTime, stage_totals
from pipeline.report.data import ReportData
from pipeline.report.figures import AXIS, layout
from pipeline.report.html import Head
from pipeline.report.timeline import job_kinds_of
from pipeline.text import MISSING, duration

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
    return UsageTable(min(data.spans), max(data.spans), [head for head, _ in columns], rows, figure(stages))


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


def total(stages: Iterable[StageTime]) -> StageTime:
    """Sum up all stages."""
    return replace(functools.reduce(StageTime.plus, stages), lane="")


def figure(stages: Mapping[str, StageTime]) -> dict[str, Any]:
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
