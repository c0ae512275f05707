"""What goes wrong in drivers themselves: noted in the journal, and over when the journal says so."""

import contextlib
import traceback
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from pipeline.run import journal
from pipeline.run.paths import RunPaths

_LONGEST = 300


class Trouble(StrEnum):
    """What a driver could not do."""

    PASS = "pass"
    """Look at the run, decide and act: nothing is launched meanwhile."""
    PACK = "pack"
    """Put old iterations into archives: they stay as files meanwhile."""
    ROWS = "rows"
    """Write rows and thin out what is old: tasks go on meanwhile."""


def described(error: BaseException) -> str:
    """An error in one line: the place too, unless it is one of the system's, which names a file."""
    words = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"[:_LONGEST]
    if isinstance(error, OSError) or not (frames := traceback.extract_tb(error.__traceback__)):
        return words
    return f"{words} (at {Path(frames[-1].filename).name}:{frames[-1].lineno})"


def note_trouble(paths: RunPaths, trouble: Trouble, text: str) -> None:
    """Write it down, if the disk takes it: a full disk may be the trouble itself."""
    with contextlib.suppress(OSError):
        journal.event(paths.events, f"{trouble}_failed", message=text)


def note_recovery(paths: RunPaths, trouble: Trouble) -> None:
    """Write down that it is over, if it was written down that there is any."""
    with contextlib.suppress(OSError):
        if trouble in outstanding(journal.read_events(paths.events)):
            journal.event(paths.events, f"{trouble}_recovered")


def outstanding(events: Iterable[Mapping[str, Any]]) -> dict[Trouble, Mapping[str, Any]]:
    """The last event of each trouble that is not over."""
    found: dict[Trouble, Mapping[str, Any]] = {}
    for event in events:
        for trouble in Trouble:
            if event.get("event") == f"{trouble}_failed":
                found[trouble] = event
            elif event.get("event") == f"{trouble}_recovered":
                found.pop(trouble, None)
    return found
