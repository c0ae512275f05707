"""A sweep as a whole: its runs, a line each, and which of them is the best so far.

The report orders a sweep's settings by the same rule.
"""

import contextlib
import json
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.run.identity import RunError
from pipeline.run.lease import holder_of
from pipeline.status.listing import CORRUPT, NOT_BEGUN, Entry, LiveIds, find_places, read_entries
from pipeline.status.listing_text import counts, lines_of
from pipeline.status.text import wrapped
from pipeline.sweep.grid import SweepError
from pipeline.sweep.manifest import Sweep, locks_of, read_sweep
from pipeline.sweep.points import Measure, config_of, measure_of
from pipeline.text import number, printable

SCHEMA = 1
LAST_REWARD = "mean reward of the newest iteration"
_NEXT = {"complete": "report", "running": "watch", "unknown": "status"}
"""Command that comes next, by state; otherwise the sweep is carried on."""


@dataclass(frozen=True)
class BestRun:
    """The best run of a sweep so far."""

    run: str
    """Run directory."""
    value: float
    title: str
    """What ``value`` is of."""
    compared: int
    """Runs that have such a value."""
    has_best_policy: bool
    """Whether the value is that of a policy of the run's, which RUN@best names."""

    @property
    def name(self) -> str:
        return Path(self.run).name

    @property
    def in_words(self) -> str:
        """Name, and why it is this one."""
        return f"{self.name}, the best of {self.compared} by {self.title} ({number(self.value)})"


@dataclass(frozen=True)
class SweepStatus:
    """Where a sweep stands."""

    root: Path
    """The sweep's folder, as it was named."""
    name: str
    entries: Sequence[Entry]
    """Runs in the sweep's order, also those that have not begun."""
    best: BestRun | None
    """None while no run has a number to be compared by."""
    driver: str | None = None
    """Command that carries the sweep out at present, in words; None without one that is seen here."""
    time: float = 0.0
    """Unix time of the look."""

    @property
    def state(self) -> str:
        """State as ``slurm-ppo status`` has it: running while anything of it is active; failed if a run
        has, and no other is active."""
        states = {entry.state for entry in self.entries}
        if self.driver or "running" in states:
            return "running"
        if states == {"complete"}:
            return "complete"
        of_all = ("unknown", "failed")
        return next((state for state in of_all if state in states), "incomplete")

    def to_json(self) -> dict[str, Any]:
        """Return stable keys and plain values."""
        best = {**asdict(self.best), "name": self.best.name} if self.best else None
        runs = [asdict(entry) for entry in self.entries]
        known = {"sweep": str(self.root.absolute()), "name": self.name, "state": self.state}
        return {"schema": SCHEMA, **known, "driver": self.driver, "best": best, "runs": runs}


def read_sweep_status(root: Path, live_ids: LiveIds) -> SweepStatus:
    """Read little of each run. Slurm is asked once, and only if a run may be active there.

    Raises:
        SweepError: the manifest cannot be read.
    """
    sweep = read_sweep(root)
    entries = read_entries(find_places(root), live_ids)
    best = find_best(entries, measure_in(root, sweep))
    return SweepStatus(root, sweep.name, entries, best, holder_of(locks_of(root)), time.time())


def measure_in(root: Path, sweep: Sweep) -> Measure | None:
    """Return what all points choose their best policy by; None where they differ, or where another version
    saved settings that this one does not know."""
    alike = {json.dumps(p.config.get("evaluate"), sort_keys=True): p for p in sweep.points}
    with contextlib.suppress(SweepError):
        return measure_of([config_of(root, point).evaluate for point in alike.values()])
    return None


def find_best(entries: Sequence[Entry], measure: Measure | None) -> BestRun | None:
    """Return the run with the best policy by the measure; where none has one, or runs have different
    measures, that with the highest mean reward in its newest row. Of equal ones the first. Pure."""
    if measure and (found := _finite([(entry, entry.best) for entry in entries])):
        choose = min if measure.is_lowest_best else max
        run, value = choose(found, key=lambda one: one[1])
        return BestRun(run.run, value, measure.title, len(found), has_best_policy=True)
    if found := _finite([(entry, entry.reward) for entry in entries]):
        run, value = max(found, key=lambda one: one[1])
        return BestRun(run.run, value, LAST_REWARD, len(found), has_best_policy=False)
    return None


def _finite(values: Sequence[tuple[Entry, float | None]]) -> list[tuple[Entry, float]]:
    return [(entry, value) for entry, value in values if value is not None and math.isfinite(value)]


def choose_run(root: Path) -> BestRun:
    """Return the best run of a sweep so far.

    Raises:
        SweepError: the manifest cannot be read.
        RunError: no run has a row yet.
    """
    best = read_sweep_status(root, lambda cluster: None).best
    if best is None:
        raise RunError(
            f"no run of the sweep {root} has a row yet, so none is the best; where they are: "
            f"slurm-ppo status {shlex.quote(str(root))}"
        )
    return best


# --- text ------------------------------------------------------------------------------------------------


def standing(status: SweepStatus) -> str:
    """Return a phrase like ``runs/rates: running, a sweep of 6 runs: 1 complete, 2 running, 3 not begun``."""
    return f"{status.root}: {state_in_words(status)}"


def state_in_words(status: SweepStatus) -> str:
    return f"{status.state}, a sweep of {counts(status.entries)}"


def describe_sweep(status: SweepStatus) -> str:
    """Describe a sweep for a person, ending in the next command."""
    return "\n".join([*wrapped(standing(status)), "", *run_lines(status), "", *closing(status)])


def run_lines(status: SweepStatus) -> list[str]:
    """Return a line of titles, and one for each run, which fit a narrow terminal."""
    return lines_of(status.entries, status.root, without=("age", "size"))


def closing(status: SweepStatus) -> list[str]:
    """Return lines on the best run, the first that failed, and what comes next."""
    lines = wrapped(f"best so far: {printable(status.best.in_words)}") if status.best else []
    place = shlex.quote(str(status.root))
    if failed := next((entry for entry in status.entries if entry.state == "failed"), None):
        lines.append(f"why:  slurm-ppo logs {shlex.quote(str(status.root / Path(failed.run).name))} --failed")
    return [*lines, f"next: slurm-ppo {_NEXT.get(status.state, 'sweep')} {place}"]


def is_at_work(entry: Entry) -> bool:
    """Whether a run may still change."""
    ended = ("complete", "failed", "cancelled", "paused", "stopped", "incomplete", NOT_BEGUN, CORRUPT)
    return entry.state not in ended
