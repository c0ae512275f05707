"""Comparison of several runs: their curves overlaid, their outcomes, and what was set differently."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.metrics.charts import CHARTS, Chart
from pipeline.metrics.terminal import Row
from pipeline.report.data import Best, read_best, read_rows
from pipeline.report.figures import meaning, overlay
from pipeline.report.html import Head, render
from pipeline.report.page import Place, by_section, outcome_of
from pipeline.report.settings import differences
from pipeline.run.directory import Run
from pipeline.run.identity import RunError
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
    places = places_of([(one.label, one.colour, one.rows) for one in compared])
    differing = differences([one.run.config for one in compared])
    return render(
        "comparison.html",
        title=" · ".join(one.label for one in compared),
        heads=[Head(""), *(Head(one.label, str(one.run.paths.root), one.colour) for one in compared)],
        outcomes=outcomes(compared),
        settings=[[key, *values] for key, values in differing.items()],
        charts=by_section(places),
        figures={place.key: place.figure for place in places},
        has_charts=bool(places),
    )


def outcomes(compared: Sequence[Compared]) -> list[list[str]]:
    """Return the rows of a table with a column for each run."""
    found = [outcome_of(one.run, one.rows, one.best) for one in compared]
    keys = dict.fromkeys(key for facts in found for key in facts)
    rows = [[key, *(facts.get(key, MISSING) for facts in found)] for key in keys]
    return [*rows, ["run directory", *(str(one.run.paths.root) for one in compared)]]


def places_of(runs: Sequence[tuple[str, str, Sequence[Row]]]) -> list[Place]:
    """Find the charts that some run has numbers for. A run is its label, its colour and its rows."""
    found = ((chart, overlay(chart, runs)) for chart in CHARTS)
    return [Place(chart, chart_text(chart, made[1]), chart.title, made[0]) for chart, made in found if made]


def chart_text(chart: Chart, kinds: Sequence[tuple[str, str]]) -> str:
    """Return the text under a chart of several runs: what it shows, and which dash is which number."""
    text = chart.caption if len(kinds) == 1 and chart.kind == "lines" else ""
    text = text or meaning(chart.names.split()[0])
    dashes = ", ".join(f"{label} {dash}" for dash, label in kinds)
    return f"{text}; {dashes}" if len(kinds) > 1 else text
