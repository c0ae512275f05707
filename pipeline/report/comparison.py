"""Comparison of several runs: their curves overlaid, their outcomes, and what was set differently."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.metrics.catalogue import Section
from pipeline.metrics.charts import CHARTS, Chart
from pipeline.metrics.terminal import Row
from pipeline.report.data import Best, read_best, read_rows
from pipeline.report.figures import meaning, overlay
from pipeline.report.html import caption, embedded, section, table, words
from pipeline.report.page import chart_id, contents, document, outcome_of
from pipeline.report.settings import differences
from pipeline.run.directory import Run, RunError
from pipeline.text import MISSING

_COLOURS = 6
"""Number of colours in the style sheet; further runs have computed ones between them."""


@dataclass(frozen=True)
class Compared:
    """One of the runs that are compared."""

    run: Run
    label: str
    """Name of the run, made unique."""
    colour: str
    rows: Sequence[Row]
    best: Best | None


def read_compared(runs: Sequence[Run]) -> list[Compared]:
    """Read rows and labels. Raises RunError for a run that is given twice, or rows that cannot be read."""
    places: dict[Path, Run] = {}
    for run in runs:
        place = run.paths.root.resolve()
        if place in places:
            raise RunError(f"{run.paths.root} is given twice; name runs that differ")
        places[place] = run
    labels = labels_of(runs)
    return [
        Compared(run, label, colour_of(index), read_rows(run), read_best(run))
        for index, (run, label) in enumerate(zip(runs, labels, strict=True))
    ]


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Return the runs' names; where two are the same with ids, and with paths where copies share an id."""
    names = [run.identity.name for run in runs]
    ids = [f"{run.identity.name} ({run.identity.id})" for run in runs]
    places = [f"{run.identity.name} ({run.paths.root})" for run in runs]
    choices = zip(names, ids, places, strict=True)
    return [
        name if names.count(name) == 1 else key if ids.count(key) == 1 else place
        for name, key, place in choices
    ]


def colour_of(index: int) -> str:
    return f"var(--c{index})" if index < _COLOURS else f"hsl({index * 137 % 360}, 55%, 50%)"


def comparison(compared: Sequence[Compared]) -> str:
    """Render the whole document."""
    charts = {
        chart_id(chart): (chart, made) for chart in CHARTS if (made := overlay(chart, _lines(compared)))
    }
    sections = {"Outcomes": outcomes(compared), "Settings": settings(compared), "Curves": curves(charts)}
    title = " · ".join(one.label for one in compared)
    parts = [f"<header><h1>{words(title)}</h1></header>", contents(sections), *sections.values()]
    figures = {key: figure for key, (_, (figure, _)) in charts.items()}
    return document(title, parts, [embedded("figures", figures)], bool(figures))


def _lines(compared: Sequence[Compared]) -> list[tuple[str, str, Sequence[Row]]]:
    return [(one.label, one.colour, one.rows) for one in compared]


def outcomes(compared: Sequence[Compared]) -> str:
    """Render a table with a column for each run."""
    found = [outcome_of(one.run, one.rows, one.best) for one in compared]
    keys = dict.fromkeys(key for facts in found for key in facts)
    rows = [[key, *(facts.get(key, MISSING) for facts in found)] for key in keys]
    rows += [["run directory", *(str(one.run.paths.root) for one in compared)]]
    return section("outcomes", "Outcomes", _table("Outcomes", compared, rows))


def _table(label: str, compared: Sequence[Compared], rows: Sequence[Sequence[str]]) -> str:
    heads = [("", ""), *((one.label, str(one.run.paths.root)) for one in compared)]
    return table(label, heads, rows, "runs", [None, *(one.colour for one in compared)])


def settings(compared: Sequence[Compared]) -> str:
    """Render the keys that have different values in the runs."""
    found = differences([one.run.config for one in compared])
    if not found:
        return section("settings", "Settings that differ", caption("None but name and run_dir."))
    rows = [[key, *values] for key, values in found.items()]
    return section("settings", "Settings that differ", _table("Settings that differ", compared, rows))


def curves(charts: Mapping[str, tuple[Chart, tuple[dict[str, Any], Sequence[tuple[str, str]]]]]) -> str:
    parts = []
    for part in Section:
        inside = [
            _place(key, chart, kinds) for key, (chart, (_, kinds)) in charts.items() if chart.section is part
        ]
        if inside:
            title = words(part[0].upper() + part[1:])
            parts.append(f'<h3 class="part">{title}</h3><div class="grid">{"".join(inside)}</div>')
    return section("curves", "Curves", *parts) if parts else ""


def _place(key: str, chart: Chart, kinds: Sequence[tuple[str, str]]) -> str:
    text = chart.caption if len(kinds) == 1 and chart.kind == "lines" else ""
    text = text or meaning(chart.names.split()[0])
    if len(kinds) > 1:
        text += "; " + ", ".join(f"{label} {dash}" for dash, label in kinds)
    title, text = words(chart.title), words(text)
    plot = f'<div class="plot" id="{key}" role="img" aria-label="{title}"></div>'
    kind = "card wide" if chart is CHARTS[0] else "card"
    return f'<div class="{kind}"><h4>{title}</h4><p class="caption">{text}</p>{plot}</div>'
