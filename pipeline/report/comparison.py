"""Several runs on one page: outcomes, curves with their spread over seeds, settings, samples side by side.

Runs of a sweep with the same settings but for their seeds are a group; of runs named one by one each is a
group of its own.
"""

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.metrics.catalogue import CHARTS
from pipeline.metrics.responses import read_samples
from pipeline.metrics.samples import Sample
from pipeline.metrics.terminal import Row
from pipeline.report.data import read_rows, shortened
from pipeline.report.figures import COLOURS, curve, merged, overlay
from pipeline.report.html import Head, render
from pipeline.report.page import ChartPlace, by_section, gpu_hours
from pipeline.report.settings import settings_table
from pipeline.run.directory import Run, is_run, load_run
from pipeline.run.identity import RunError
from pipeline.run.records import is_measured
from pipeline.run.retention import BestPolicy, read_best
from pipeline.sweep.manifest import Sweep, SweepPoint, read_sweep
from pipeline.sweep.naming import in_words, short_keys
from pipeline.sweep.points import Measure, measure_of, run_folder
from pipeline.text import MISSING, number, spread_text

_SAMPLE_BYTES = 4 << 20
_PROMPTS, _LETTERS, _MOST_GROUPS = 6, 1200, 8
"""Prompts that are shown side by side, letters of each text, and groups."""


@dataclass(frozen=True)
class Member:
    """One of the runs, which has begun."""

    point: SweepPoint
    run: Run
    rows: Sequence[Row]
    """Rows, ascending, as :func:`pipeline.report.data.read_rows` returns them."""
    best: BestPolicy | None
    is_measured: bool
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
class RunGroup:
    """Runs with the same settings but for their seeds."""

    label: str
    number: int
    """Place among the groups, from 0 on, which says the colour; the same in every chart."""
    size: int
    """Number of runs, with those that have not begun."""
    members: Sequence[Member]

    @property
    def colour(self) -> str:
        return f"var(--c{self.number})" if self.number < COLOURS else f"hsl({self._hue}, 55%, 50%)"

    @property
    def soft(self) -> str:
        """Colour of the area between the lowest and the highest run."""
        return f"var(--c{self.number}-soft)" if self.number < COLOURS else f"hsla({self._hue}, 55%, 50%, .16)"

    @property
    def _hue(self) -> int:
        return self.number * 137 % 360

    @property
    def mean(self) -> list[Row]:
        """Rows of means over the runs."""
        return merged([member.rows for member in self.members], statistics.fmean)

    def edge(self, name: str, pick: Callable[[Iterable[float]], float]) -> list[Row]:
        """Return rows of the lowest or the highest value of a number, where several runs have it."""
        rows = [
            [{k: row[k] for k in ("iteration", name) if k in row} for row in m.rows] for m in self.members
        ]
        return [row for row in merged(rows, pick, least=2) if name in row]


@dataclass(frozen=True)
class Comparison:
    """All that the page is made from."""

    title: str
    points: Sequence[SweepPoint]
    """Runs, with those that have not begun, in the order given."""
    keys: Sequence[str]
    """Keys of the settings that tell runs apart."""
    groups: Sequence[RunGroup]
    """Groups, best first."""
    measure: Measure | None
    """Measure of the best policy; None where runs have different ones."""
    sweep: Sweep | None = None
    root: Path = Path()
    """Folder of the sweep."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Reason by name of the points whose runs cannot be read."""
    now: float = field(default_factory=time.time)

    @property
    def members(self) -> list[Member]:
        return [member for group in self.groups for member in group.members]


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Read runs that are named one by one.

    Raises:
        RunError: a run is given twice, or its rows cannot be read.
    """
    places = [run.paths.root.resolve() for run in runs]
    for run, place in zip(runs, places, strict=True):
        if places.count(place) > 1:
            raise RunError(f"{run.paths.root} is given twice; name runs that differ")
    labels = labels_of(runs)
    members = [
        _member(SweepPoint(str(run.paths.root), {"name": label}, {}), run)
        for run, label in zip(runs, labels, strict=True)
    ]
    groups = [RunGroup(m.point.settings["name"], i, 1, [m]) for i, m in enumerate(members)]
    measure = measure_of([run.config.evaluate for run in runs])
    points = [member.point for member in members]
    return Comparison(" · ".join(labels), points, ["name"], _best_first(groups, measure), measure)


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


def compare_sweep(root: Path) -> Comparison:
    """Read a sweep's runs.

    Raises:
        SweepError: the manifest cannot be read.
        RunError: no run has a row yet.
    """
    sweep = read_sweep(root)
    members, unreadable = [], {}
    for point in sweep.points:
        try:
            if is_run(folder := run_folder(root, point)):
                members.append(_member(point, load_run(folder)))
        except RunError as error:
            unreadable[point.name] = str(error)
    if not any(member.last for member in members):
        raise RunError(f"no run of the sweep {root} has a row yet; where they are: slurm-ppo ls {root}")
    measure = measure_of([member.run.config.evaluate for member in members])
    groups = _best_first(groups_of(sweep.points, members, sweep.keys), measure)
    return Comparison(sweep.name, sweep.points, sweep.keys, groups, measure, sweep, root, unreadable)


def _member(point: SweepPoint, run: Run) -> Member:
    return Member(point, run, read_rows(run), read_best(run.paths), is_measured(run.plan, run.paths))


def groups_of(
    points: Iterable[SweepPoint], members: Sequence[Member], keys: Collection[str] = ()
) -> list[RunGroup]:
    """Put runs of the same settings together, in the sweep's order.

    Args:
        keys: all keys that are swept: names of settings in the labels differ from theirs.
    """
    found: dict[frozenset[tuple[str, str]], list[SweepPoint]] = {}
    for point in points:
        found.setdefault(frozenset(point.without_seed.items()), []).append(point)
    groups = []
    for place, of_group in enumerate(found.values()):
        label = in_words(of_group[0].without_seed, keys) or "all seeds"
        begun = [member for member in members if member.point in of_group]
        groups.append(RunGroup(label, place, len(of_group), begun))
    return groups


def _best_first(groups: Iterable[RunGroup], measure: Measure | None) -> list[RunGroup]:
    """Sort by the best policies' measure where there is one, else by the last mean reward. Those with the
    former come first."""

    def merit(group: RunGroup) -> tuple[bool, float]:
        best = [member.best.reward for member in group.members if member.best and measure]
        sign = -1 if best and measure and measure.is_lowest_best else 1
        found = best or _last(group, "reward/mean")
        return bool(best), sign * sum(found) / len(found) if found else float("-inf")

    return sorted(groups, key=merit, reverse=True)


def _last(group: RunGroup, name: str) -> list[float]:
    return [member.last[name] for member in group.members if name in member.last]


# --- the page --------------------------------------------------------------------------------------------


def comparison_page(data: Comparison) -> str:
    """Render the whole document."""
    of_sweep = data.sweep is not None
    shown = [g for g in data.groups if not of_sweep or any(member.last for member in g.members)]
    places, configs = curves(shown), [group.members[0].run.config for group in shown]
    short = short_keys(data.keys)
    return render(
        "comparison.html",
        title=data.title,
        data=data,
        complete=sum(member.is_complete for member in data.members),
        **outcomes(data.groups, data.measure),
        order=data.measure.in_words if data.measure else _LAST_REWARD,
        settings=settings_table(configs, data.keys if of_sweep else ()),
        settings_heads=[Head("setting"), *(Head(g.label, "", g.colour) for g in shown)],
        runs=[run_row(data, point) for point in data.points],
        run_heads=[*(Head(short[key], key) for key in data.keys), *_heads(_RUN, data.measure)],
        samples=samples_beside(data),
        charts=by_section(places),
        figures={place.key: place.figure for place in places},
        has_charts=bool(places),
        has_spread=any(len(group.members) > 1 for group in shown),
    )


_LAST_REWARD = "mean reward of the newest iteration, since evaluate.best differs between the runs"
_BEST_POLICY = Head("best", "of the best policy, by its run's evaluate.best, which differs between the runs")
_OUTCOMES = (
    Head("runs complete"),
    Head("iteration", "newest, from the slowest to the fastest run"),
    Head("mean reward", "of the newest iteration; mean ± standard deviation over runs"),
    _BEST_POLICY,
    Head("KL", "of the newest iteration, to the reference; over runs"),
    Head("response length", "of the newest iteration, in tokens; over runs"),
    Head("GPU hours", "of all runs, as Slurm accounts for them"),
)
_RUN = (
    Head("iteration"),
    Head("mean reward"),
    _BEST_POLICY,
    Head("run", "its own report, where there is one"),
)


def _heads(heads: Sequence[Head], measure: Measure | None) -> list[Head]:
    """Return heads of a table, with the measure in place of "best" where all runs have the same."""
    if measure is None:
        return list(heads)
    named = Head(measure.title, "of the best policy; over several runs mean ± standard deviation")
    return [named if head is _BEST_POLICY else head for head in heads]


def outcomes(groups: Sequence[RunGroup], measure: Measure | None) -> dict[str, Any]:
    """Return rows and heads of the table of outcomes, without columns that no group has numbers for."""
    rows = [_outcome(group) for group in groups]
    shown = [i for i, column in enumerate(zip(*rows, strict=True)) if set(column) != {MISSING}]
    return {
        "outcomes": [
            {"label": group.label, "colour": group.colour, "cells": [row[i] for i in shown]}
            for group, row in zip(groups, rows, strict=True)
        ],
        "outcome_heads": [_heads(_OUTCOMES, measure)[i] for i in shown],
    }


def _outcome(group: RunGroup) -> list[str]:
    """Return the cells of a group in the table of outcomes."""
    done = sorted(member.done for member in group.members)
    hours = sum(gpu_hours(member.rows) for member in group.members)
    return [
        f"{sum(member.is_complete for member in group.members)} of {group.size}",
        MISSING if not done else str(done[0]) if done[0] == done[-1] else f"{done[0]} to {done[-1]}",
        spread_text(_last(group, "reward/mean")),
        spread_text([member.best.reward for member in group.members if member.best]),
        spread_text(_last(group, "objective/kl")),
        spread_text(_last(group, "response_length/mean")),
        number(hours) if hours else MISSING,
    ]


def run_row(data: Comparison, point: SweepPoint) -> dict[str, Any]:
    """Return the row of a run: its settings, how far it is, and where."""
    member = next((member for member in data.members if member.point is point), None)
    cells = [point.settings.get(key, MISSING) for key in data.keys]
    if member is None:
        cells += [data.unreadable.get(point.name, "not begun"), MISSING, MISSING]
    else:
        best = member.best.reward if member.best else None
        done = f"{member.done} of {member.run.config.iterations}"
        cells += [done, number(member.last.get("reward/mean")), number(best)]
    is_linked = data.sweep and (run_folder(data.root, point) / "report.html").is_file()
    return {
        "cells": cells,
        "name": point.name,
        "link": f"{quote(point.name)}/report.html" if is_linked else "",
    }


# --- curves ----------------------------------------------------------------------------------------------


def curves(groups: Sequence[RunGroup]) -> list[ChartPlace]:
    """Draw the charts that some group has numbers for: a line of means each, with an area over its seeds."""
    lines = [(group.label, group.colour, group.mean) for group in groups]
    places = []
    for chart in CHARTS:
        if made := overlay(chart, lines):
            figure, text = made
            name = chart.names.split()[0]
            areas = [trace for group in groups for trace in _area(group, name)] if "*" not in name else []
            drawn = figure | {"data": [*areas, *figure["data"]]}
            places.append(ChartPlace(chart, text, chart.title, drawn))
    return places


def _area(group: RunGroup, name: str) -> list[dict[str, Any]]:
    """Return the traces of the area from the lowest to the highest run; none where there is one run."""
    if not (low := group.edge(name, min)):
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
    return [edge | curve(low, name), edge | area | curve(group.edge(name, max), name)]


# --- samples ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """Responses to the same prompts, a column for each group."""

    iteration: int
    heads: Sequence[Head]
    prompts: Sequence[tuple[str, Sequence[Sample | None]]]
    """Each prompt, and the response of each group; None where the group has none."""


def samples_beside(data: Comparison) -> Beside | None:
    """Read responses to prompts that several groups were given in the same iteration; None without any.

    Runs of the same seed are given the same prompts.
    """
    begun = [(group, [m for m in group.members if m.last]) for group in data.groups[:_MOST_GROUPS]]
    chosen = [(group, min(members, key=lambda m: m.run.config.seed)) for group, members in begun if members]
    if len(chosen) < 2:
        return None
    iteration = min(member.done for _, member in chosen)
    read = [_first_responses(member, iteration) for _, member in chosen]
    shared = [key for key in read[0] if sum(key in found for found in read) > 1]
    rows = []
    for key in shared[:: max(1, len(shared) // _PROMPTS)][:_PROMPTS]:
        samples = [shortened(found[key], _LETTERS) if key in found else None for found in read]
        rows.append((next(sample.prompt for sample in samples if sample), samples))
    heads = [Head(group.label, member.point.name, group.colour) for group, member in chosen]
    return Beside(iteration, heads, rows) if rows else None


def _first_responses(member: Member, iteration: int) -> dict[str, Sample]:
    """Return the first response to each prompt, by the prompt's id."""
    found: dict[str, Sample] = {}
    for sample in read_samples(member.run, iteration, max_bytes=_SAMPLE_BYTES).rows:
        found.setdefault(sample.prompt_id, sample)
    return found
