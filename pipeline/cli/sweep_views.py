"""Sweeps where a run may be named: all of its runs are shown, or the best of them is chosen and named."""

import json
import os
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from pipeline.cli.listing import live_runs
from pipeline.run.directory import Run, is_run, load_run
from pipeline.run.identity import RunError
from pipeline.run.versions import split
from pipeline.status.sweep import choose_run, describe_sweep, read_sweep_status
from pipeline.sweep.manifest import is_sweep, read_sweep
from pipeline.sweep.points import run_folder


def show_status(root: Path, as_json: bool, cost: bool) -> str:
    """Print where the runs of a sweep stand. Returns the sweep's state.

    Raises:
        SweepError: the manifest cannot be read.
        RunError: costs are wanted.
    """
    if cost:
        raise RunError(
            f"{root} is a sweep, and --cost is of one run: slurm-ppo status RUN --cost; GPU hours of each: "
            f"slurm-ppo ls {shlex.quote(str(root))}"
        )
    found = read_sweep_status(root, live_runs)
    print(json.dumps(found.to_json(), indent=1) if as_json else describe_sweep(found))
    return found.state


def watch(root: Path, interval: float) -> str:
    """Look at a sweep while it goes on. Returns its state. Raises SweepError."""
    from pipeline.watch.sweep import watch_sweep

    read_sweep(root)
    return watch_sweep(root, interval, live_runs)


def of_one_run(source: str, is_best_wanted: bool = True) -> str:
    """Return a source of one run: of a sweep that of its best run, which is named on standard error.

    Args:
        source: ``RUN`` or ``SWEEP``, also with ``@ITERATION`` or ``@best``.
        is_best_wanted: whether a sweep's folder alone means the best policy of that run, where it has one;
            otherwise it means what the run's directory alone does.

    Raises:
        SweepError: the sweep's manifest cannot be read.
        RunError: no run of the sweep has a row yet.
    """
    root, word = (Path(source), "") if is_sweep(Path(source)) else split(source)
    if is_run(root) or not is_sweep(root):
        return source
    best = choose_run(root)
    print(f"of the sweep {root}: {best.in_words}", file=sys.stderr)
    if not word and is_best_wanted and best.has_best_policy:
        word = "best"
    return f"{best.run}@{word}" if word else best.run


def runs_of(folders: Sequence[Path]) -> list[Run]:
    """Load runs, of a sweep those that have begun and are not named themselves. Those of a sweep that cannot
    be read are named on standard error.

    Raises:
        SweepError: a sweep's manifest cannot be read.
        RunError: a run that was named cannot be read, or no run of a sweep has begun.
    """
    named = {os.path.realpath(folder) for folder in folders}
    of_each = (_begun(folder, named) if is_sweep(folder) else [load_run(folder)] for folder in folders)
    return [run for runs in of_each for run in runs]


def _begun(root: Path, named: Collection[str]) -> list[Run]:
    found = []
    for folder in [run_folder(root, point) for point in read_sweep(root).points]:
        try:
            if is_run(folder) and os.path.realpath(folder) not in named:
                found.append(load_run(folder))
        except RunError as error:
            print(f"left out: {error}", file=sys.stderr)
    if not found:
        raise RunError(
            f"no run of the sweep {root} can be shown yet; where they are: slurm-ppo status {root}"
        )
    return found
