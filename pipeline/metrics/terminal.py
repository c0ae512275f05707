"""Text views of a run's rows for the terminal: a table, a curve, a sparkline. Pure: rows in, text out.

Rows are those of ``metrics.jsonl``, ascending; any number may be absent from any row. Colours are ANSI
sequences, and only there when ``color`` is true.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.text import number

Row = Mapping[str, float]

_BLOCKS = "▁▂▃▄▅▆▇█"
_STANDARD_ERRORS = 2.0
"""Standard errors to each side of a mean: of means that nothing moves nineteen in twenty are so close."""
_AXIS_COLUMNS = 10
"""Columns of a plot that its frame and numbers take."""


@dataclass(frozen=True)
class Column:
    """A column of numbers: the sum of ``names``, times ``scale``."""

    title: str
    names: tuple[str, ...]
    digits: int = 3
    scale: float = 1

    def value(self, row: Row) -> float | None:
        """Return the row's number, or None when the row has none of the names."""
        found = [row[name] for name in self.names if name in row]
        return self.scale * sum(found) if found else None


COLUMNS: tuple[Column, ...] = (
    Column("iter", ("iteration",)),
    Column("reward", ("reward/mean",)),
    Column("± std", ("reward/std",)),
    Column("KL", ("objective/kl",), 2),
    Column("entropy", ("policy/entropy",), 2),
    Column("clip %", ("policy/clip_fraction_low", "policy/clip_fraction_high"), 1, scale=100),
    Column("length", ("response_length/mean",), 1),
    Column("eval", ("evaluate/reward",)),
    Column("s/iter", ("seconds/iteration",), 1),
    Column("tok/s", ("tokens_per_second/rollout",), 0),
)

_FIRST_TO_GO = ("tok/s", "± std", "clip %", "entropy", "length", "s/iter", "KL", "eval")
"""Columns that are dropped on a narrow terminal, in this order."""


def cells(row: Row, columns: Sequence[Column] = COLUMNS) -> list[str]:
    """Return one text per column."""
    return [number(column.value(row), column.digits) for column in columns]


def iteration_table(rows: Sequence[Row], width: int = 80) -> str:
    """Format one line per row under a line of titles; columns are dropped until ``width`` suffices."""
    columns = list(COLUMNS)
    for title in (None, *_FIRST_TO_GO):
        columns = [column for column in columns if column.title != title]
        lines = [[column.title for column in columns], *(cells(row, columns) for row in rows)]
        widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
        if sum(widths) + len(widths) - 1 <= width:
            break
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= width else " "
    return "\n".join(gap.join(text.rjust(w) for text, w in zip(line, widths, strict=True)) for line in lines)


@dataclass(frozen=True)
class Interval:
    """A point of a curve, and the interval that chance alone may have moved it in."""

    at: float
    """Iteration; of several their mean."""
    value: float
    low: float
    high: float


def reward_curve(rows: Sequence[Row], width: int = 80, height: int = 16) -> str:
    """Plot ``reward/mean`` over iterations with its spread, and ``evaluate/reward`` as dots.

    No line joins the points: what differs by less than the spread is no trend.

    Args:
        width: columns of the text, at least 30.
        height: lines of the text, at least 8.

    Returns:
        The plot, or one line that says so when no row has a reward.
    """
    width, height = max(width, 30), max(height, 8)
    means, dots = means_of(rows), points(rows, "evaluate/reward")
    if not means and not dots:
        return "no reward yet"
    key = f"mean reward ┼  {_STANDARD_ERRORS:.0f} standard errors │"
    if len(means) > (room := width - _AXIS_COLUMNS):
        step = math.ceil(len(means) / room)
        means, key = together(means, step), f"mean reward of {step} iterations ┼  lowest to highest │"
    heldout = "  held-out ●" if dots else ""
    key = f"{key}{heldout}" if len(key) + len(heldout) <= width else f"reward ┼{heldout}"
    return f"{key.center(width).rstrip()}\n{_plot(means, dots, width, height - 1)}"


def means_of(rows: Sequence[Row]) -> list[Interval]:
    """Return the mean reward of every row that has a finite one, with two standard errors to each side; with
    none where the number of responses or their standard deviation is not known."""
    found, before = [], None
    for row in rows:
        total = row.get("samples", 0.0)
        # The first row of a fork counts its parent's responses too.
        count = total - before if before is not None else total / max(1.0, row["iteration"])
        before = row.get("samples", before)
        if math.isfinite(value := row.get("reward/mean", math.nan)):
            deviation = row.get("reward/std", 0.0)
            error = deviation / math.sqrt(count) if count > 0 and math.isfinite(deviation) else 0.0
            margin = _STANDARD_ERRORS * error
            found.append(Interval(row["iteration"], value, value - margin, value + margin))
    return found


def together(found: Sequence[Interval], count: int) -> list[Interval]:
    """Join each ``count`` neighbours to their mean, with their lowest and highest value."""
    parts = [found[first : first + count] for first in range(0, len(found), count)]
    joined = []
    for part in parts:
        values = [one.value for one in part]
        at = sum(one.at for one in part) / len(part)
        joined.append(Interval(at, sum(values) / len(values), min(values), max(values)))
    return joined


def points(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    """Return (iteration, value) of every row that has a finite value."""
    return [(r["iteration"], r[name]) for r in rows if name in r and math.isfinite(r[name])]


def _plot(means: Sequence[Interval], dots: Sequence[tuple[float, float]], width: int, height: int) -> str:
    """Draw on plotext's only figure, which is cleared first."""
    import plotext

    plotext.terminal.limit(False, False)
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.canvas("default")
    figure.plot_size(width, height)
    middles = [(one.at, one.value) for one in means]
    ends = [(one.at, end) for one in means for end in (one.low, one.high)]
    xs, ys = zip(*ends, *dots, strict=True)
    x_limits, y_limits = _limits(xs, 1.0), _limits(ys, abs(ys[0]) / 10 or 1.0)
    whiskers = _whiskers(means, (y_limits[1] - y_limits[0]) / (2 * height))
    for signal, marker in ((whiskers, "│"), (middles, "┼"), (dots, "circle")):
        if signal:
            figure.draw(figure.signal(*map(list, zip(*signal, strict=True)), marker=marker))
    _rule(figure.ruler("x"), *x_limits, even_ticks(*x_limits, width // 10, whole=True))
    _rule(figure.ruler("y"), *y_limits, even_ticks(*y_limits, height // 2))
    return "\n".join(text.rstrip() for text in str(figure.build().string(colorless=True)).splitlines())


def _whiskers(means: Sequence[Interval], step: float) -> list[tuple[float, float]]:
    """Return points from the lower to the upper end of each spread, ``step`` apart at most."""
    return [
        (one.at, one.low + (one.high - one.low) * i / count)
        for one in means
        if one.high > one.low
        for count in [math.ceil((one.high - one.low) / step)]
        for i in range(count + 1)
    ]


def _rule(ruler: Any, low: float, high: float, ticks: Sequence[float]) -> None:
    """Give an axis limits and labelled ticks."""
    ruler.lim(low, high)
    digits = 0 if all(tick == int(tick) for tick in ticks) else max(0, 2 - round(math.log10(high - low)))
    ruler.ticks(list(ticks), [f"{tick:.{digits}f}" for tick in ticks])


def _limits(values: Sequence[float], margin: float) -> tuple[float, float]:
    """Return the lowest and the highest value, with ``margin`` around them when they are the same."""
    low, high = min(values), max(values)
    return (low, high) if low < high else (low - margin, high + margin)


def even_ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Return at most ``count`` + 1 multiples of 1, 2 or 5 times a power of ten between distinct limits."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= count)
    step = max(step, 1.0) if whole else step
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """Draw at most ``width`` block characters from lowest to highest; each averages a share of values.

    Absent and non-finite values are left out; a share with only such values is a space.
    """
    count = min(len(values), width)
    shares = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    finite = [[v for v in share if v is not None and math.isfinite(v)] for share in shares]
    means = [sum(found) / len(found) if found else None for found in finite]
    known = [mean for mean in means if mean is not None]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    if span == 0:
        return "".join(" " if mean is None else _BLOCKS[3] for mean in means)
    return "".join(" " if m is None else _BLOCKS[round((m - low) / span * 7)] for m in means)
