"""A list of runs as people read it. Pure: entries in, lines out."""

import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from pipeline.status.listing import CORRUPT, Entry
from pipeline.text import MISSING, duration, number, printable, shortened, size, table

_TITLES = ("run", "state", "iteration", "reward", "best", "GPU h", "age", "last row", "size")
_BEST, _HOURS = 4, 5
"""Columns that not every list has."""
_LONGEST_NOTE = 100
COUNTED = "size: policies, critics and trainers' states, without shards and logs"


def describe(entries: Sequence[Entry], folder: Path) -> str:
    """Return a line for each run, and their sum."""
    return "\n".join([*lines_of(entries, folder), "", summary(entries)])


def lines_of(entries: Sequence[Entry], folder: Path, without: Collection[str] = ()) -> list[str]:
    """Return a line of titles, and one for each run.

    Args:
        without: titles of columns to leave out.
    """
    optional = {_HOURS: any(entry.gpu_hours is not None for entry in entries)}
    optional |= {_BEST: any(entry.best is not None for entry in entries)}
    shown = [i for i, title in enumerate(_TITLES) if optional.get(i, True) and title not in without]
    titles = [*_TITLES[:_BEST], _title_of_best(entries), *_TITLES[_HOURS:]]
    lines = [titles, *(_cells(entry, folder) for entry in entries)]
    texts = table([[line[i] for i in shown] for line in lines], left=2)
    for at, entry in enumerate(entries, 1):
        if entry.note:
            texts[at] += f"  {shortened(printable(entry.note), _LONGEST_NOTE)}"
    return texts


def _title_of_best(entries: Sequence[Entry]) -> str:
    """Return what the best values are of; where runs choose theirs by different metrics, that they are the
    best."""
    metrics = {entry.best_metric for entry in entries if entry.best is not None}
    if len(metrics) > 1:
        return _TITLES[_BEST]
    return printable(next(iter(metrics), None) or "held-out")


def summary(entries: Sequence[Entry]) -> str:
    """Sum the entries up: how many are in which state, and what they hold."""
    held = size(sum(entry.bytes or 0 for entry in entries))
    return f"{counts(entries)}; {held} ({COUNTED})"


def counts(entries: Sequence[Entry]) -> str:
    """Say how many runs there are, and how many in which state."""
    states = Counter(entry.state for entry in entries)
    message = ", ".join(f"{count} {state}" for state, count in states.most_common())
    return f"{len(entries)} run{'' if len(entries) == 1 else 's'}: {message or 'none left'}"


def _cells(entry: Entry, folder: Path) -> tuple[str, ...]:
    known = entry.iteration is not None and entry.iterations is not None
    return (
        printable(os.path.relpath(entry.run, folder)) if entry.run != str(folder) else printable(entry.run),
        entry.state,
        f"{entry.iteration}/{entry.iterations}" if known else MISSING,
        number(entry.reward, 3),
        number(entry.best, 3),
        number(entry.gpu_hours, 1),
        MISSING if entry.age is None else duration(entry.age),
        MISSING if entry.idle is None else duration(entry.idle),
        MISSING if entry.bytes is None or entry.state == CORRUPT else size(entry.bytes),
    )
