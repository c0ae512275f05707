"""HTML page about a run: opens from disk, loads nothing, reads in light and dark, wide and narrow.

The page itself is ``templates/page.html``; this module makes its content. Colours in the charts are names of
CSS variables; the script puts in the values of the reader's colour scheme and draws again when that changes.
"""

import itertools
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.changeable import value_in_words
from pipeline.config.compose import to_yaml
from pipeline.config.evaluate import HELDOUT_REWARD
from pipeline.metrics.advice_input import MIN_ROWS, Advice
from pipeline.metrics.catalogue import CHARTS, Chart, describe
from pipeline.metrics.samples import Choice, Sample
from pipeline.metrics.terminal import COLUMNS, Column, Row, cells
from pipeline.report.data import ReportData
from pipeline.report.figures import figure, meaning
from pipeline.report.forecast import forecast_table
from pipeline.report.html import Head, moment, render
from pipeline.report.settings import settings_apart
from pipeline.report.timeline import timeline_data, usage, windows_of, workers_table
from pipeline.run.benchmarks import in_words, read_measured
from pipeline.run.changes import SettingsChange
from pipeline.text import duration, number, visible

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


_CHANGES = (
    Head("from iteration", "the first that was not trained then"),
    Head("when"),
    Head("by"),
    Head("key"),
    Head("before"),
    Head("after"),
)


@dataclass(frozen=True)
class ChartPlace:
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
        outcome=outcome_of(data),
        resume=f"slurm-ppo resume {shlex.quote(str(run.paths.root))}",
        settings=[(key, value_in_words(value)) for key, value in settings_apart(run.config).items()],
        settings_heads=[Head("key"), Head("value")],
        changes=changes_table(run.changes),
        changes_heads=_CHANGES,
        configuration=to_yaml(run.config),
        findings=[(found, places_about(found, places)) for found in data.advice],
        noticed=noticed_rows(data),
        noticed_heads=_NOTICED,
        is_old_enough=len(data.trained) >= MIN_ROWS,
        charts=by_section(places),
        windows=windows_of(data.spans),
        timeline=timeline_data(data),
        usage=used,
        forecast=forecast_table(data),
        workers=workers_table(data.beats, data.now),
        filters=filters_of(data.samples),
        samples=[_sample_entry(choice, sample) for choice, sample in data.samples],
        iterations=iteration_table(data.rows),
        figures=figures,
        has_charts=bool(figures or data.spans),
    )


def outcome_of(data: ReportData) -> dict[str, str]:
    """Sum up how far a run came, and its results."""
    run, rows, best = data.run, data.trained, data.best
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
    total, measured = len(run.plan.benchmarks()), read_measured(run.paths)
    message = in_words(measured, len(measured), total)
    return found | ({"evaluate.command": message} if message else {})


def gpu_hours(rows: Sequence[Row]) -> float:
    """Sum the GPU hours of all stages and iterations for which accounting answered."""
    return sum(value for row in rows for name, value in row.items() if name.startswith("slurm/gpu_hours/"))


def places_about(found: Advice, places: Iterable[ChartPlace]) -> list[ChartPlace]:
    """Return the charts on the page that show the numbers that a finding rests on."""
    patterns = {metric.name for name in found.metrics if (metric := describe(name))}
    return [p for p in places if patterns & {*p.chart.names.split(), *p.chart.lower.split()}]


def changes_table(changes: Iterable[SettingsChange]) -> list[list[str]]:
    """Return the rows of a table of settings that were changed while the run went on, oldest first."""
    return [
        [
            str(one.iteration),
            moment(one.time),
            one.by,
            made.key,
            value_in_words(made.before),
            value_in_words(made.after),
        ]
        for one in changes
        for made in one.settings
    ]


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


def places_of(rows: Sequence[Row]) -> list[ChartPlace]:
    """Find the charts that have numbers."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    places = []
    for chart in CHARTS:
        if made := figure(chart, rows, names):
            text = chart.caption or meaning(chart.names.split()[0])
            if not chart.caption and "yaxis2" in made["layout"]:
                text += f"; below: {meaning(chart.lower.split()[0])}"
            places.append(ChartPlace(chart, text, f"{chart.title}: {text}", made))
    return places


def by_section(places: Iterable[ChartPlace]) -> list[tuple[str, list[ChartPlace]]]:
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


# --- samples, which the reader filters and sorts ---------------------------------------------------------


def filters_of(samples: Sequence[tuple[Choice | None, Sample]]) -> dict[str, Any]:
    """Return the values that the reader chooses between, and how many samples of which choice there are."""
    counts = {choice: sum(other is choice for other, _ in samples) for choice in Choice}
    rewards = [sample.reward for _, sample in samples if math.isfinite(sample.reward)]
    return {
        "kinds": ", ".join(f"{count} {choice}" for choice, count in counts.items() if count),
        "iterations": sorted({sample.iteration for _, sample in samples}, reverse=True),
        "choices": list(Choice),
        "reasons": sorted({sample.finish_reason for _, sample in samples}),
        "low": f"{min(rewards):.3g}" if rewards else "",
        "high": f"{max(rewards):.3g}" if rewards else "",
    }


def _sample_entry(choice: Choice | None, sample: Sample) -> dict[str, Any]:
    """Return a sample for the page's script."""
    return {
        "choice": str(choice),
        "iteration": sample.iteration,
        "id": visible(sample.prompt_id),
        "index": sample.sample_index,
        "prompt": visible(sample.prompt),
        "response": visible(sample.response),
        "reward": _rounded(sample.reward),
        "components": {visible(name): _rounded(value) for name, value in sample.components.items()},
        "kl": _rounded(sample.kl),
        "length": sample.length,
        "reason": visible(sample.finish_reason),
        "turns": sample.num_turns,
    }


def _rounded(value: float | None) -> float | None:
    """Round to six digits: shards hold rewards in single precision. None for what JSON has no number for."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
