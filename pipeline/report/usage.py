"""Where the jobs' time went, by stage: a table and a stacked bar."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pipeline.config.job_kinds import DRIVER
from pipeline.metrics.spans import StageTime, stage_totals
from pipeline.report.data import ReportData
from pipeline.report.html import caption, facts, folded, section, table
from pipeline.report.timeline import job_kinds_of
from pipeline.text import MISSING, duration

PARTS: Mapping[str, str] = {
    "queue": "waited in the queue",
    "startup": "start-up",
    "compute": "model compute",
    "idle": "idle",
    "retry": "without a result",
}
_COLOURS = {
    "queue": "var(--axis)",
    "startup": "var(--c4)",
    "compute": "var(--c2)",
    "idle": "var(--c3)",
    "retry": "var(--bad)",
}
_MEANINGS: Mapping[str, str] = {
    "waited": "from when nothing but the scheduler kept an attempt from starting (its inputs were committed "
    "and it was submitted; where Slurm's accounting answers, its job was eligible) until it started. It "
    "holds nothing meanwhile.",
    "ran": "from a job's start to its end, while it holds what it asked for. The four shares are of this.",
    "start-up": "of attempts that committed, from the job's start to the first model compute: imports, "
    "loading models.",
    "compute": "of attempts that committed, the seconds in which a model computed.",
    "idle": "of attempts that committed, the rest, in which reserved GPUs compute nothing: reading, "
    "hashing, rules, writing, leaving.",
    "no result": "all of the attempts that failed, were preempted, killed or requeued, or came second.",
}
"""Exact meanings of the table's words. Everything is a sum over attempts."""


def usage(data: ReportData) -> tuple[str, dict[str, Any] | None]:
    """Render the section, and make the figure of its chart; empty and None where nothing ran."""
    stages = stage_totals(data.spans.values())
    ordered = {job_kind: stages[job_kind] for job_kind in job_kinds_of(data) if stages[job_kind].attempts}
    if not ordered:
        return "", None
    first, last = min(data.spans), max(data.spans)
    of = f"Iterations {first} to {last}" if first < last else f"Iteration {first}"
    place = '<div class="plot" id="usage-plot" role="img" aria-label="Time by stage"></div>'
    parts = (
        caption(f"{of}, summed over all attempts."),
        _table(ordered),
        f'<div class="card wide">{place}</div>',
        folded("What these words mean", facts(_MEANINGS.items(), "meanings")),
    )
    return section("usage", "Where the time went", *parts), figure(ordered)


_HEADS = (
    ("stage", ""),
    ("partition", "where most of it ran"),
    ("attempts", "that started"),
    ("failed", "attempts that ended without a result"),
    ("waited", "sum over attempts"),
    ("ran", "sum over attempts"),
    ("start-up", "share of the time that its jobs ran"),
    ("compute", "share of the time that its jobs ran"),
    ("idle", "share of the time that its jobs ran"),
    ("no result", "share of the time that its jobs ran"),
    ("waited/ran", "seconds in the queue for each second that it ran"),
)
_HOURS = (("GPU hours", "as Slurm accounts for them"), ("CPU hours", "as Slurm accounts for them"))


def _table(stages: Mapping[str, StageTime]) -> str:
    """Render the table, with hours and partitions where there are any."""
    hidden = {title for title, _ in _HOURS if not any(stage.cpu_hours for stage in stages.values())}
    hidden |= {"partition"} if all(stage.lane == job_kind for job_kind, stage in stages.items()) else set()
    heads = [head for head in (*_HEADS, *_HOURS) if head[0] not in hidden]
    rows = [_cells(*item) for item in (*stages.items(), ("all", total(stages.values())))]
    return table("Time by stage", heads, [[row[title] for title, _ in heads] for row in rows], "sums")


def _cells(job_kind: str, stage: StageTime) -> dict[str, str]:
    """Return the cells of a row, by column."""
    shares = {
        "start-up": stage.startup,
        "compute": stage.compute,
        "idle": stage.idle,
        "no result": stage.retry,
    }
    is_task = job_kind != DRIVER
    return {
        "stage": job_kind,
        "partition": stage.lane,
        "attempts": str(stage.attempts),
        "failed": str(stage.failed),
        "waited": duration(stage.queue),
        "ran": duration(stage.run),
        **{title: _percent(part, stage.run) if is_task else MISSING for title, part in shares.items()},
        "waited/ran": f"{stage.queue / stage.run:.2f}" if stage.run else MISSING,
        "GPU hours": f"{stage.gpu_hours:.2f}",
        "CPU hours": f"{stage.cpu_hours:.2f}",
    }


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else MISSING


def total(stages: Iterable[StageTime]) -> StageTime:
    """Sum up all stages."""
    return replace(functools.reduce(StageTime.plus, stages), lane="")


def figure(stages: Mapping[str, StageTime]) -> dict[str, Any]:
    """Draw stacked bars, one per stage, in the largest unit in which the longest has at least two."""
    tasks = {job_kind: stage for job_kind, stage in stages.items() if job_kind != DRIVER}
    longest = max((stage.queue + stage.run for stage in tasks.values()), default=0.0)
    unit, size = next(
        ((name, size) for name, size in (("hours", 3600), ("minutes", 60)) if longest >= 2 * size),
        ("seconds", 1),
    )
    traces = [_trace(part, tasks, size) for part in PARTS]
    return {"data": traces, "layout": _layout(unit, len(tasks))}


def _trace(part: str, stages: Mapping[str, StageTime], size: int) -> dict[str, Any]:
    values = [getattr(stage, part) for stage in stages.values()]
    marker: dict[str, Any] = {"color": _COLOURS[part], "line": {"width": 0}}
    if part == "queue":
        marker["pattern"] = {"shape": "/", "size": 6, "solidity": 0.25, "fillmode": "replace"}
    return {
        "type": "bar",
        "orientation": "h",
        "name": PARTS[part],
        "y": list(stages),
        "x": [round(value / size, 4) for value in values],
        "text": [duration(value) for value in values],
        "textposition": "none",
        "hovertemplate": f"%{{y}}, {PARTS[part]}: %{{text}}<extra></extra>",
        "marker": marker,
    }


def _layout(unit: str, count: int) -> dict[str, Any]:
    lines = {"gridcolor": "var(--line)", "zerolinecolor": "var(--axis)", "automargin": True}
    title = {"text": f"{unit}, summed over attempts", "standoff": 8, "font": {"size": 12}}
    hover = {"bgcolor": "var(--panel)", "bordercolor": "var(--axis)", "font": {"color": "var(--ink)"}}
    return {
        "height": 110 + 34 * count,
        "margin": {"l": 70, "r": 12, "t": 12, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--soft)"},
        "barmode": "stack",
        "bargap": 0.3,
        "xaxis": {**lines, "title": title, "rangemode": "tozero", "nticks": 8},
        "yaxis": {**lines, "autorange": "reversed", "type": "category"},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "hoverlabel": {**hover, "namelength": -1},
        "hovermode": "closest",
    }
