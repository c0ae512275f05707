"""HTML page about a run: opens from disk, loads nothing, reads in light and dark, wide and narrow.

The page itself is ``templates/page.html``; this module makes its content. Colours in the charts are names of
CSS variables; the script puts in the values of the reader's colour scheme and draws again when that changes.
"""

import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.compose import to_yaml
from pipeline.config.evaluate import HELDOUT_REWARD
from pipeline.metrics.advice import Advice
from pipeline.metrics.advice_input import MIN_ROWS
from pipeline.metrics.catalogue import describe
from pipeline.metrics.charts import CHARTS, Chart
from pipeline.metrics.terminal import COLUMNS, Column, Row, cells
from pipeline.report.browser import filters_of, samples_data
from pipeline.report.data import Best, ReportData
from pipeline.report.figures import figure, meaning
from pipeline.report.html import Head, moment, render
from pipeline.report.settings import plain_text, settings_apart
from pipeline.report.timeline import timeline_data, windows_of
from pipeline.report.usage import usage
from pipeline.report.workers import workers_table
from pipeline.run.benchmarks import in_words, read_measured
from pipeline.run.directory import Run
from pipeline.text import duration, number

_TABLE_ROWS = 500
"""Most iterations that the table holds."""

MORE_COLUMNS = (
    Column("KL coef", ("objective/kl_coef",)),
    Column("cut %", ("response_length/clip_ratio",), 1, scale=100),
    Column("grad norm", ("policy/grad_norm",)),
    Column("expl. var.", ("value/explained_variance",)),
)


_NOTICED = (
    Head("iteration", "whose row was the first to show it"),
    Head("when"),
    Head("severity"),
    Head("what was noticed"),
    Head("numbers"),
    Head("still so", "whether the newest iterations show it"),
)


@dataclass(frozen=True)
class Place:
    """A chart's place on a page that has numbers for it."""

    chart: Chart
    text: str
    """Text under the title."""
    label: str
    """Text for those who do not see the chart."""
    figure: dict[str, Any]

    @property
    def key(self) -> str:
        return chart_id(self.chart)

    @property
    def is_wide(self) -> bool:
        return self.chart is CHARTS[0]


def page(data: ReportData) -> str:
    """Render the whole document."""
    run, places, used = data.run, places_of(data.rows), usage(data)
    figures = {place.key: place.figure for place in places}
    if used:
        figures["usage-plot"] = used.figure
    return render(
        "page.html",
        title=run.identity.name,
        data=data,
        run=run,
        outcome=outcome_of(run, data.rows, data.best) | measured_in_words(run),
        resume=f"slurm-ppo resume {shlex.quote(str(run.paths.root))}",
        settings=[(key, plain_text(value)) for key, value in settings_apart(run.config).items()],
        settings_heads=[Head("key"), Head("value")],
        configuration=to_yaml(run.config),
        findings=[(found, places_about(found, places)) for found in data.advice],
        noticed=noticed_rows(data),
        noticed_heads=_NOTICED,
        is_old_enough=len(data.trained) >= MIN_ROWS,
        charts=by_section(places),
        windows=windows_of(data.spans),
        timeline=timeline_data(data),
        usage=used,
        workers=workers_table(data.beats, data.now),
        filters=filters_of(data.samples),
        samples=samples_data(data.samples),
        iterations=iteration_table(data.rows),
        figures=figures,
        has_charts=bool(figures or data.spans),
    )


def outcome_of(run: Run, rows: Sequence[Row], best: Best | None) -> dict[str, str]:
    """Sum up how far a run came, and its results. ``rows`` as :func:`read_rows` gives them."""
    rows = [row for row in rows if row["iteration"] > run.plan.start]
    done = int(rows[-1]["iteration"]) if rows else run.plan.start
    found = {"iterations": f"{done} of {run.config.iterations}"}
    if means := [row["reward/mean"] for row in rows if "reward/mean" in row]:
        found["mean reward, first → last"] = f"{number(means[0])} → {number(means[-1])}"
    if best:
        title = "best on held-out prompts" if best.metric == HELDOUT_REWARD else f"best {best.metric}"
        found[title] = f"{number(best.reward)} (policy {best.iteration})"
    for name, title in (("objective/kl", "KL"), ("response_length/mean", "response length")):
        if rows and name in rows[-1]:
            found[title] = number(rows[-1][name])
    if hours := gpu_hours(rows):
        found["GPU hours"] = number(hours)
    if rows and "seconds/elapsed" in rows[-1]:
        found["elapsed"] = duration(rows[-1]["seconds/elapsed"])
    return found


def measured_in_words(run: Run) -> dict[str, str]:
    """Return how many policies evaluate.command has measured, and which numbers are missing, if it is set."""
    total, measured = len(run.plan.benchmarks()), read_measured(run.paths)
    told = in_words(measured, len(measured), total)
    return {"evaluate.command": told} if told else {}


def gpu_hours(rows: Sequence[Row]) -> float:
    """Sum the GPU hours of all stages and iterations for which accounting answered."""
    return sum(value for row in rows for name, value in row.items() if name.startswith("slurm/gpu_hours/"))


def places_about(found: Advice, places: Iterable[Place]) -> list[Place]:
    """Return the charts on the page that show the numbers that a finding rests on."""
    patterns = {metric.name for name in found.metrics if (metric := describe(name))}
    return [p for p in places if patterns & {*p.chart.names.split(), *p.chart.lower.split()}]


def noticed_rows(data: ReportData) -> list[list[str]]:
    """Return the rows of a table of what was noticed while the run went on, newest first."""
    now = {found.rule for found in data.advice}
    return [
        [
            str(one.iteration),
            moment(one.time),
            str(one.advice.severity),
            f"{one.advice.title} ({one.advice.rule})",
            one.advice.what,
            "yes" if one.advice.rule in now else "no",
        ]
        for one in reversed(data.noticed)
    ]


def places_of(rows: Sequence[Row]) -> list[Place]:
    """Find the charts that have numbers."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    figures = ((chart, figure(chart, rows, names)) for chart in CHARTS)
    return [_place(chart, made) for chart, made in figures if made]


def _place(chart: Chart, made: dict[str, Any]) -> Place:
    text = chart.caption or meaning(chart.names.split()[0])
    if not chart.caption and "yaxis2" in made["layout"]:
        text += f"; below: {meaning(chart.lower.split()[0])}"
    return Place(chart, text, f"{chart.title}: {text}", made)


def by_section(places: Iterable[Place]) -> list[tuple[str, list[Place]]]:
    """Group the places by the titles of their sections, which follow each other in :data:`CHARTS`."""
    groups = itertools.groupby(places, lambda place: place.chart.section)
    return [(section[0].upper() + section[1:], list(found)) for section, found in groups]


def chart_id(chart: Chart) -> str:
    """Return the id of the chart's place, to which links elsewhere lead."""
    return "chart-" + re.sub(r"[^a-z0-9]+", "-", chart.title.lower()).strip("-")


def iteration_table(rows: Sequence[Row]) -> dict[str, Any]:
    """Return title, heads and rows of the table of the newest rows, newest first."""
    columns = [
        column for column in (*COLUMNS, *MORE_COLUMNS) if any(column.value(row) is not None for row in rows)
    ]
    return {
        "title": "Iterations" if len(rows) <= _TABLE_ROWS else f"Newest {_TABLE_ROWS} iterations",
        "heads": [Head(column.title, "; ".join(map(meaning, column.names))) for column in columns],
        "rows": [cells(row, columns) for row in reversed(rows[-_TABLE_ROWS:])],
    }
