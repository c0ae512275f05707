"""Groups of a sweep's runs, which differ in their seeds only: means and spread over them. Pure."""

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.metrics.charts import Chart
from pipeline.metrics.terminal import Row
from pipeline.report.comparison import colour_of
from pipeline.report.data import Best
from pipeline.report.figures import overlay
from pipeline.report.page import Place
from pipeline.run.directory import Run
from pipeline.sweep.manifest import Point
from pipeline.sweep.naming import in_words
from pipeline.text import MISSING, number

_COLOURS = 6
"""Colours of the style sheet that have a soft one for areas."""


@dataclass(frozen=True)
class Member:
    """One run of a sweep that has begun."""

    point: Point
    run: Run
    rows: Sequence[Row]
    """Rows, ascending, as :func:`pipeline.report.data.read_rows` returns them."""
    best: Best | None
    is_measured: bool = True
    """Whether evaluate.command has nothing left to measure."""

    @property
    def last(self) -> Row:
        """The newest row of an iteration; empty without one."""
        return self.rows[-1] if self.rows and self.rows[-1]["iteration"] > self.run.plan.start else {}

    @property
    def done(self) -> int:
        return int(self.last.get("iteration", self.run.plan.start))

    @property
    def is_complete(self) -> bool:
        return self.done >= self.run.config.iterations and self.is_measured


@dataclass(frozen=True)
class Group:
    """Runs of a sweep with the same settings but for their seeds."""

    label: str
    colour: str
    soft: str
    """Colour of the area between the lowest and the highest run."""
    size: int
    """Number of runs, with those that have not begun."""
    members: Sequence[Member]

    @property
    def mean(self) -> list[Row]:
        """Rows of means over the runs."""
        return merged([member.rows for member in self.members], statistics.fmean)

    def spread(self, name: str) -> tuple[list[Row], list[Row]]:
        """Return rows of the lowest and the highest value of a number, where several runs have it."""
        rows = [[_only(row, name) for row in member.rows] for member in self.members]
        several = [merged(rows, pick, least=2) for pick in (min, max)]
        return several[0], several[1]


def groups_of(points: Iterable[Point], members: Sequence[Member], keys: Collection[str] = ()) -> list[Group]:
    """Put runs of the same settings together, in the sweep's order.

    Args:
        keys: all keys that are swept: names of settings in the labels differ from theirs.
    """
    found: dict[frozenset[tuple[str, str]], list[Point]] = {}
    for point in points:
        found.setdefault(frozenset(point.without_seed.items()), []).append(point)
    return [
        Group(
            in_words(of_group[0].without_seed, keys) or "all seeds",
            colour_of(index),
            soft_of(index),
            len(of_group),
            [member for member in members if member.point in of_group],
        )
        for index, of_group in enumerate(found.values())
    ]


def soft_of(index: int) -> str:
    """Return the colour of an area beside a line of ``colour_of(index)``."""
    return f"var(--c{index}-soft)" if index < _COLOURS else f"hsla({index * 137 % 360}, 55%, 50%, .16)"


def _only(row: Row, name: str) -> Row:
    return {key: row[key] for key in ("iteration", name) if key in row}


def merged(runs: Sequence[Sequence[Row]], how: Any, least: int = 1) -> list[Row]:
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


def spread_text(values: Sequence[float]) -> str:
    """Write mean and standard deviation over runs like ``0.412 ± 0.031``; of one run its value."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return MISSING
    mean = number(statistics.fmean(known))
    return mean if len(known) == 1 else f"{mean} ± {number(statistics.stdev(known))}"


# --- curves ----------------------------------------------------------------------------------------------


def places_of(charts: Iterable[Chart], groups: Sequence[Group], texts: Any) -> list[Place]:
    """Draw the charts that some group has numbers for: a line of means each, with an area over its seeds."""
    lines = [(group.label, group.colour, group.mean) for group in groups]
    found = ((chart, overlay(chart, lines)) for chart in charts)
    return [
        Place(chart, texts(chart, made[1]), chart.title, with_areas(made[0], chart, groups))
        for chart, made in found
        if made
    ]


def with_areas(figure: dict[str, Any], chart: Chart, groups: Sequence[Group]) -> dict[str, Any]:
    """Lay areas from the lowest to the highest seed under the lines of a chart's first number."""
    name = chart.names.split()[0]
    areas = [trace for group in groups for trace in _area(group, name)] if "*" not in name else []
    return figure | {"data": [*areas, *figure["data"]]}


def _area(group: Group, name: str) -> list[dict[str, Any]]:
    low, high = ([row for row in rows if name in row] for rows in group.spread(name))
    if not low:
        return []
    edge = {
        "type": "scatter",
        "mode": "lines",
        "line": {"width": 0, "color": group.colour},
        "legendgroup": group.label,
        "showlegend": False,
        "hoverinfo": "skip",
    }
    area = {"fill": "tonexty", "fillcolor": group.soft}
    return [edge | _points(low, name), edge | area | _points(high, name)]


def _points(rows: Sequence[Row], name: str) -> dict[str, list[float]]:
    return {"x": [row["iteration"] for row in rows], "y": [float(f"{row[name]:.6g}") for row in rows]}
