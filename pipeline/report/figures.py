"""The report's charts: plain plotly figures (dictionaries) whose colours are names of CSS variables."""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from pipeline.metrics.catalogue import FEW, HIGH, LOW, Chart, describe
from pipeline.metrics.terminal import Row
from pipeline.run.tasks import Stage

COLOURS = 6
"""Series colours of the style sheet: --c0 and so on, and --c0-soft for areas."""
_STAGES = (Stage.ROLLOUT, Stage.REWARD, Stage.UPDATE, Stage.EVALUATE)
"""Stages in the order of their colours, the same in every chart; the pools' scores follow."""
_MANY = 200
"""Number of points above which lines and diamonds are drawn finer, and stacked bars as areas."""
_MOST_POINTS = 1500
"""Most points of a curve; of longer ones the lowest and highest of each part are drawn."""


def figure(chart: Chart, rows: Sequence[Row], names: Sequence[str]) -> dict[str, Any] | None:
    """Make a plotly figure with colours as CSS variables, or None when no row has the chart's numbers.

    Args:
        names: all names that occur in ``rows``.
    """
    if chart.kind == "band":
        upper = _band(chart.names.split(), rows)
    else:
        draw = _line if chart.kind == "lines" else _bars if len(rows) <= _MANY else _area
        upper = [draw(rows, *found) for found in _series(chart.names.split(), names)]
    if not upper:
        return None
    lower = [_line(rows, name, label, 1 + i, "y2") for name, label, i in _series(chart.lower.split(), names)]
    return {"data": [*upper, *lower], "layout": _layout(chart, rows, len(upper) + len(lower), bool(lower))}


_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def overlay(
    chart: Chart, runs: Sequence[tuple[str, str, Sequence[Row]]]
) -> tuple[dict[str, Any], str] | None:
    """Draw one chart of several runs over each other; also return the text under it.

    Args:
        runs: (label, colour, rows) of each; a run has the same colour in every chart.

    Returns:
        None when no run has the chart's numbers.
    """
    names = list(dict.fromkeys(name for _, _, rows in runs for row in rows for name in row))
    upper = _series([name for name in chart.names.split() if name not in (LOW, HIGH)], names)
    if chart.kind == "band" and not chart.names.startswith("reward/"):
        upper = upper[:1]  # shortest and longest of every run would hide each other
    lower = _series(chart.lower.split(), names)
    traces = [
        _overlaid(run, name, label, number, axis)
        for kind, axis in ((upper, "y"), (lower, "y2"))
        for number, (name, label, _) in enumerate(kind)
        for run in runs
    ]
    traces = [trace for trace in traces if trace["x"]]
    if not upper or not traces:
        return None
    seen: set[str] = set()
    for trace in traces:
        trace["showlegend"] = trace["legendgroup"] not in seen
        seen.add(trace["legendgroup"])
    rows = sorted((row for _, _, of_run in runs for row in of_run), key=lambda row: row["iteration"])
    kinds = [(_DASHES[i % len(_DASHES)], label) for i, (_, label, _) in enumerate(upper)]
    made = {"data": traces, "layout": _layout(chart, rows, len(runs), bool(lower))}
    return made, _text_under(chart, kinds)


def _text_under(chart: Chart, kinds: Sequence[tuple[str, str]]) -> str:
    """Return the text under a chart of several runs: what it shows, and which dash is which number."""
    text = chart.caption if len(kinds) == 1 and chart.kind == "lines" else ""
    text = text or meaning(chart.names.split()[0])
    dashes = ", ".join(f"{label} {dash}" for dash, label in kinds)
    return f"{text}; {dashes}" if len(kinds) > 1 else text


def _overlaid(
    run: tuple[str, str, Sequence[Row]], name: str, label: str, number: int, axis: str
) -> dict[str, Any]:
    title, colour, rows = run
    line = _line(rows, name, title, 0, axis)
    line["line"] |= {"color": colour, "dash": _DASHES[number % len(_DASHES)]}
    line |= {
        "legendgroup": escape(title),
        "hovertemplate": f"%{{y}} {escape(title)} {escape(label)}<extra></extra>",
    }
    return line


def _series(patterns: Iterable[str], names: Sequence[str]) -> list[tuple[str, str, int]]:
    """Find (name, label, colour) of the numbers that the patterns match."""
    found: list[tuple[str, str, int]] = []
    for pattern in patterns:
        before, _, after = pattern.partition("*")
        for name in names:
            metric = describe(name)
            if metric is None or metric.name != pattern:
                continue
            end = len(name) - (0 if "*" in after else len(after))
            label = name[len(before) : end] if "*" in pattern else name
            found.append((name, label, _colour(label, [other for _, other, _ in found])))
    return found


def _colour(label: str, before: Sequence[str]) -> int:
    """Choose the colour of a series, given the labels of those before it."""
    if label in _STAGES:
        return _STAGES.index(Stage(label))
    if _is_pool(label):
        return len(_STAGES) + sum(map(_is_pool, before))
    return len(before)


def _is_pool(label: str) -> bool:
    """Whether a series is of one pool's scores."""
    return label.startswith(f"{Stage.SCORE}-")


def curve(rows: Sequence[Row], name: str) -> dict[str, list[float | None]]:
    """Return x and y; six digits are enough to look at, and what is not finite leaves a gap."""
    found = thinned([(row["iteration"], row[name]) for row in rows if name in row])
    y = [float(f"{value:.6g}") if math.isfinite(value) else None for _, value in found]
    return {"x": [iteration for iteration, _ in found], "y": y}


def thinned(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> Sequence[tuple[float, float]]:
    """Thin a curve to about ``most`` points: of each part the lowest, the highest and one gap.

    So peaks stay, and what is drawn are values of the curve. Pure.
    """
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / (most - 2))
    kept = [0, len(points) - 1]
    for start in range(0, len(points), size):
        part = range(start, min(start + size, len(points)))
        finite = [i for i in part if math.isfinite(points[i][1])]
        kept += [pick(finite, key=lambda i: points[i][1]) for pick in (min, max) if finite]
        kept += [i for i in part if i not in finite][:1] if len(finite) < len(part) else []
    return [points[i] for i in sorted(set(kept))]


def merged(
    runs: Sequence[Sequence[Row]], how: Callable[[Iterable[float]], float], least: int = 1
) -> list[Row]:
    """Return a row for each iteration: of every number that at least ``least`` runs have, ``how`` over them.

    Numbers that are not finite are left out.
    """
    found: dict[float, dict[str, list[float]]] = {}
    for rows in runs:
        for row in rows:
            of_iteration = found.setdefault(row["iteration"], {})
            for name, value in row.items():
                if name != "iteration" and math.isfinite(value):
                    of_iteration.setdefault(name, []).append(value)
    return [
        {"iteration": iteration} | {n: how(values) for n, values in names.items() if len(values) >= least}
        for iteration, names in sorted(found.items())
    ]


def _line(rows: Sequence[Row], name: str, label: str, colour: int, axis: str = "y") -> dict[str, Any]:
    points = curve(rows, name)
    dash = ("solid", "dash", "dot", "dashdot")[colour // COLOURS % 4]
    width = 2 if len(points["x"]) <= _MANY else 1
    line = {"color": f"var(--c{colour % COLOURS})", "width": width, "dash": dash}
    mode = "lines+markers" if len(points["x"]) <= FEW else "lines"
    style = {"mode": mode, "line": line, "marker": {"size": 5}, "yaxis": axis}
    return {"type": "scatter", "name": escape(label), **points, **style}


def _bars(rows: Sequence[Row], name: str, label: str, colour: int) -> dict[str, Any]:
    marker = {"color": f"var(--c{colour % COLOURS})", "line": {"width": 0}}
    return {"type": "bar", "name": escape(label), **curve(rows, name), "marker": marker}


def _area(rows: Sequence[Row], name: str, label: str, colour: int) -> dict[str, Any]:
    """Draw one of many stacked bars as an area; of very many iterations every second, third, ..."""
    step = math.ceil(len(rows) / _MOST_POINTS)
    line = {"color": f"var(--c{colour % COLOURS})", "width": 0}
    points = curve([{name: 0.0, **row} for row in rows[::step]], name)
    style = {"mode": "lines", "line": line, "stackgroup": "1"}
    return {"type": "scatter", "name": escape(label), **points, **style}


def _band(names: Sequence[str], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Draw a line between two edges, and diamonds. The area between the edges is shaded."""
    rows = [_with_edges(row) for row in rows]
    middle, low, high, *dots = names
    known = {name for row in rows for name in row}
    edge = {"mode": "lines", "line": {"width": 0, "color": "var(--c0)"}, "showlegend": False}
    area = {"fill": "tonexty", "fillcolor": "var(--c0-soft)"}
    traces = []
    if {middle, low, high} <= known:
        traces += [_line(rows, low, low, 0) | edge, _line(rows, high, high, 0) | edge | area]
    traces += [_line(rows, name, name, 0) for name in [middle] if name in known]
    for name in known & set(dots):
        points = _line(rows, name, name, 1)
        marker = {"size": 9 if len(points["x"]) <= _MANY else 4, "symbol": "diamond", "color": "var(--c1)"}
        traces.append(points | {"mode": "markers", "marker": marker})
    return traces


def _with_edges(row: Row) -> Row:
    if "reward/mean" not in row or "reward/std" not in row:
        return row
    mean, std = row["reward/mean"], row["reward/std"]
    return {**row, LOW: mean - std, HIGH: mean + std}


def _layout(chart: Chart, rows: Sequence[Row], series: int, has_lower: bool) -> dict[str, Any]:
    first, last = rows[0]["iteration"], rows[-1]["iteration"]
    title = {"text": "iteration", "standoff": 8, "font": {"size": 12}}
    x = {**AXIS, "title": title, "zeroline": False, "tickformat": "d", "range": [first - 0.6, last + 0.6]}
    x |= {"unifiedhovertitle": {"text": "iteration %{x}"}} | ({"dtick": 1} if last - first <= FEW else {})
    x |= {"spikecolor": "var(--axis)", "spikethickness": 1, "spikedash": "solid"}
    x |= {"anchor": "y2"} if has_lower else {}
    y = {**AXIS, "hoverformat": ".4~g", "exponentformat": "e", "nticks": 6}
    y["rangemode"] = "tozero" if chart.from_zero else "normal"
    lower = {"yaxis2": {**y, "domain": [0.0, 0.3], "nticks": 4}} if has_lower else {}
    return layout(
        height=320,
        margin={"l": 52, "r": 12, "t": 12, "b": 44},
        bargap=0.15,
        xaxis=x,
        yaxis={**y, "domain": [0.4, 1.0] if has_lower else [0.0, 1.0]},
        **lower,
        showlegend=series > 1,
        hovermode="x unified",
        hoversubplots="axis",
    )


AXIS = {"gridcolor": "var(--line)", "zerolinecolor": "var(--axis)", "automargin": True}


def layout(**more: Any) -> dict[str, Any]:
    """Return what the layouts of all charts have in common, and ``more``."""
    hover = {"bgcolor": "var(--panel)", "bordercolor": "var(--axis)", "font": {"color": "var(--ink)"}}
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--soft)"},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "hoverlabel": {**hover, "namelength": -1},
        "barmode": "stack",
        **more,
    }


def meaning(name: str) -> str:
    """Return what METRICS says about a name; the name itself when it says nothing."""
    metric = describe(name)
    return metric.meaning if metric else name
