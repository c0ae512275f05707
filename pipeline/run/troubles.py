"""Failures of drivers themselves: noted in the journal, and over when the journal says so."""

import contextlib
import traceback
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from pipeline.run import journal
from pipeline.run.paths import RunPaths

LOST = "state_lost"
"""Name of the event of a trainer's state that was lost; its ``iteration`` says whose."""
LEARNED_AGAIN = "learned_again"
"""Name of the event of an update, its ``iteration``, that learned iterations before it again."""
_LONGEST = 300


class Trouble(StrEnum):
    """Part of a driver's work that failed."""

    PASS = "pass"
    """Pass (look at the run, decide and act): nothing is launched meanwhile."""
    PACK = "pack"
    """Packing of old iterations into archives: they stay as files meanwhile."""
    ROWS = "rows"
    """Writing of rows and thinning of what is old: tasks go on meanwhile."""
    WANDB = "wandb"
    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    """Sending of rows to W&B or another tracker: tasks and rows go on meanwhile."""


def described(error: BaseException) -> str:
    """Describe an error in one line, with its place unless it is an OSError, which names a file."""
    words = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"[:_LONGEST]
    if isinstance(error, OSError) or not (frames := traceback.extract_tb(error.__traceback__)):
        return words
    return f"{words} (at {Path(frames[-1].filename).name}:{frames[-1].lineno})"


def note_trouble(paths: RunPaths, trouble: Trouble, text: str) -> None:
    """Write a trouble to the journal, if the disk takes it: a full disk may be the trouble itself."""
    with contextlib.suppress(OSError):
        journal.event(paths.events, f"{trouble}_failed", message=text)


def note_recovery(paths: RunPaths, trouble: Trouble) -> None:
    """Write to the journal that a trouble is over, if the journal says that there is one."""
    with contextlib.suppress(OSError):
        if trouble in outstanding(journal.read_events(paths.events)):
            journal.event(paths.events, f"{trouble}_recovered")


def outstanding(events: Iterable[Mapping[str, Any]]) -> dict[Trouble, Mapping[str, Any]]:
    """Return the last event of each trouble that is not over."""
    found: dict[Trouble, Mapping[str, Any]] = {}
    for event in events:
        for trouble in Trouble:
            if event.get("event") == f"{trouble}_failed":
                found[trouble] = event
            elif event.get("event") == f"{trouble}_recovered":
                found.pop(trouble, None)
    return found
