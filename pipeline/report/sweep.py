"""Report of a sweep: outcomes by settings, mean and spread over seeds, samples side by side."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.metrics.charts import CHARTS
from pipeline.metrics.samples import Sample, read_samples
from pipeline.report.comparison import chart_text
from pipeline.report.data import read_best, read_rows, shortened
from pipeline.report.groups import Group, Member, groups_of, places_of, spread_text
from pipeline.report.html import Head, render
from pipeline.report.page import by_section, gpu_hours
from pipeline.report.settings import differences
from pipeline.run.directory import is_run, load_run
from pipeline.run.identity import RunError
from pipeline.run.records import is_measured
from pipeline.sweep.grid import SEED, plain_number
from pipeline.sweep.manifest import Point, Sweep, read_sweep
from pipeline.sweep.measure import Measure, measure_of
from pipeline.sweep.naming import short_keys
from pipeline.sweep.points import run_folder
from pipeline.text import MISSING, number

_SAMPLE_BYTES = 4 << 20
_PROMPTS, _LETTERS, _MOST_GROUPS = 6, 1200, 8
"""Prompts that are shown side by side, letters of each text, and groups."""


@dataclass(frozen=True)
class SweepData:
    """All that the report of a sweep is made from."""

    root: Path
    sweep: Sweep
    groups: Sequence[Group]
    """Groups, best first."""
    now: float
    unreadable: Mapping[str, str]
    """Reason by name of the points whose runs cannot be read."""
    measure: Measure | None = None
    """Measure of the best policy; None where runs have different ones."""

    @property
    def members(self) -> list[Member]:
        return [member for group in self.groups for member in group.members]


def read_sweep_data(root: Path) -> SweepData:
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
                run = load_run(folder)
                measured = is_measured(run.plan, run.paths)
                members.append(Member(point, run, read_rows(run), read_best(run), measured))
        except RunError as error:
            unreadable[point.name] = str(error)
    if not any(member.last for member in members):
        raise RunError(f"no run of the sweep {root} has a row yet; where they are: slurm-ppo ls {root}")
    measure = measure_of([member.run.config.evaluate for member in members])
    groups = groups_of(sweep.points, members, sweep.keys)
    groups.sort(key=lambda group: _merit(group, measure), reverse=True)
    return SweepData(root, sweep, groups, time.time(), unreadable, measure)


def _merit(group: Group, measure: Measure | None) -> tuple[bool, float]:
    """Return what groups are ordered by: the best policies' measure where there is one, else the last mean
    reward. Those with the former come first."""
    best = [member.best.reward for member in group.members if member.best and measure]
    last = _last(group.members, "reward/mean")
    sign = -1 if best and measure and measure.is_lowest_best else 1
    found = best or last
    return bool(best), sign * sum(found) / len(found) if found else float("-inf")


def sweep_page(data: SweepData) -> str:
    """Render the whole document."""
    shown = [group for group in data.groups if any(member.last for member in group.members)]
    places = places_of(CHARTS, shown, chart_text)
    several = any(len(group.members) > 1 for group in shown)
    keys = short_keys(data.sweep.keys)
    return render(
        "sweep.html",
        title=data.sweep.name,
        data=data,
        complete=sum(member.is_complete for member in data.members),
        **outcomes(data.groups, data.measure),
        order=data.measure.in_words if data.measure else _LAST_REWARD,
        settings=settings_table(shown, data.sweep.keys),
        settings_heads=[Head("setting"), *(Head(g.label, "", g.colour) for g in shown)],
        runs=[run_row(data, point, keys) for point in data.sweep.points],
        run_heads=[*(Head(keys[key], key) for key in data.sweep.keys), *_heads(_RUN, data.measure)],
        samples=samples_beside(data),
        charts=by_section(places),
        figures={place.key: place.figure for place in places},
        has_charts=bool(places),
        has_spread=several,
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


def outcomes(groups: Sequence[Group], measure: Measure | None) -> dict[str, Any]:
    """Return rows and heads of the table of outcomes, without columns that no group has numbers for."""
    rows = [outcome(group) for group in groups]
    columns = list(zip(*(row["cells"] for row in rows), strict=True))
    shown = [i for i, column in enumerate(columns) if set(column) != {MISSING}]
    return {
        "outcomes": [row | {"cells": [row["cells"][i] for i in shown]} for row in rows],
        "outcome_heads": [_heads(_OUTCOMES, measure)[i] for i in shown],
    }


def outcome(group: Group) -> dict[str, Any]:
    """Return the row of a group in the table of outcomes."""
    members = group.members
    done = sorted(member.done for member in members)
    span = MISSING if not done else str(done[0]) if done[0] == done[-1] else f"{done[0]} to {done[-1]}"
    hours = sum(gpu_hours(member.rows) for member in members)
    cells = [
        f"{sum(member.is_complete for member in members)} of {group.size}",
        span,
        spread_text(_last(members, "reward/mean")),
        spread_text([member.best.reward for member in members if member.best]),
        spread_text(_last(members, "objective/kl")),
        spread_text(_last(members, "response_length/mean")),
        number(hours) if hours else MISSING,
    ]
    return {"label": group.label, "colour": group.colour, "cells": cells}


def _last(members: Sequence[Member], name: str) -> list[float]:
    return [member.last[name] for member in members if name in member.last]


def settings_table(groups: Sequence[Group], swept: Collection[str]) -> list[list[str]]:
    """Return key and value in each group, of the settings in which groups differ, with short names; none
    where these are the swept keys alone, whose values name the groups."""
    found = differences([group.members[0].run.config for group in groups])
    found = {key: values for key, values in found.items() if key != SEED and not key.startswith("tracking.")}
    if set(found) <= set(swept):
        return []
    short = short_keys(found)
    return [[short[key], *map(plain_number, values)] for key, values in found.items()]


def run_row(data: SweepData, point: Point, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the row of a run: its settings, how far it is, and where."""
    member = next((member for member in data.members if member.point is point), None)
    report = run_folder(data.root, point) / "report.html"
    cells = [point.settings.get(key, MISSING) for key in keys]
    if member is None:
        cells += [data.unreadable.get(point.name, "not begun"), MISSING, MISSING]
    else:
        best = member.best.reward if member.best else None
        done = f"{member.done} of {member.run.config.iterations}"
        cells += [done, number(member.last.get("reward/mean")), number(best)]
    link = f"{quote(point.name)}/report.html" if report.is_file() else ""
    return {"cells": cells, "name": point.name, "link": link}


# --- samples ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """Responses to the same prompts, a column for each group."""

    iteration: int
    heads: Sequence[Head]
    prompts: Sequence[tuple[str, Sequence[Sample | None]]]
    """Each prompt, and the response of each group; None where the group has none."""


def samples_beside(data: SweepData) -> Beside | None:
    """Read responses to prompts that several groups were given in the same iteration; None without any.

    Runs of the same seed are given the same prompts.
    """
    chosen = [(g, m) for g in data.groups[:_MOST_GROUPS] if (m := _first_seed(g)) is not None]
    if len(chosen) < 2:
        return None
    iteration = min(member.done for _, member in chosen)
    read = [_first_responses(member, iteration) for _, member in chosen]
    shared = [key for key in read[0] if sum(key in found for found in read) > 1]
    if not shared:
        return None
    step = max(1, len(shared) // _PROMPTS)
    rows = list(_rows(shared[::step][:_PROMPTS], read))
    return Beside(iteration, [Head(g.label, m.point.name, g.colour) for g, m in chosen], rows)


def _first_seed(group: Group) -> Member | None:
    """Return the run with rows of the lowest seed."""
    begun = [member for member in group.members if member.last]
    return min(begun, key=lambda member: member.run.config.seed, default=None)


def _first_responses(member: Member, iteration: int) -> dict[str, Sample]:
    """Return the first response to each prompt, by the prompt's id."""
    found: dict[str, Sample] = {}
    for sample in read_samples(member.run, iteration, _SAMPLE_BYTES):
        found.setdefault(sample.prompt_id, sample)
    return found


def _rows(
    keys: Sequence[str], read: Sequence[Mapping[str, Sample]]
) -> Iterator[tuple[str, list[Sample | None]]]:
    for key in keys:
        samples = [shortened(found[key], _LETTERS) if key in found else None for found in read]
        yield next(sample.prompt for sample in samples if sample), samples
