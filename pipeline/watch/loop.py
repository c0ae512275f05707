"""Looking on until there is nothing more to see, on a screen or by lines."""

import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from pipeline.process import interruptible

SILENT_SECONDS = 10.0
"""Seconds after which an unfinished look is reported: the file system does not answer."""
_Look = TypeVar("_Look")
_LookSeen = TypeVar("_LookSeen", covariant=True)


class Seen(Protocol[_LookSeen]):
    """The newest of everything that was read."""

    @property
    def look(self) -> _LookSeen | None: ...

    @property
    def trouble(self) -> str | None:
        """Reason why the last try to read failed."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing of it will change any more."""


class Background(Protocol[_LookSeen]):
    """Threads that read."""

    arrived: threading.Event
    """Event that is set whenever there is something new in :attr:`seen`."""

    @property
    def seen(self) -> Seen[_LookSeen]: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check(self) -> None:
        """Raise the error that ended a thread."""


def look_on(reading: Background[_Look], draw: Callable[[], bool], tell: Callable[[], bool]) -> bool:
    """Show what is read until it has ended (True), or the person quits (False).

    Args:
        draw: shows it on a screen.
        tell: the same by lines, where no screen can be drawn.
    """
    reading.start()
    try:
        with interruptible():
            return draw() if _has_terminal() else tell()
    except KeyboardInterrupt:  # one way to quit
        return False
    finally:
        reading.stop()


def _has_terminal() -> bool:
    """Whether a screen can be drawn where this process prints."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def tell_changes(
    reading: Background[_Look], what: str, changes: Callable[[_Look | None, _Look], Iterable[str]]
) -> bool:
    """Print a line for each change, until nothing will change any more; then return True.

    Args:
        what: what is read, for people.
        changes: returns lines on what has changed between two looks.
    """
    last: _Look | None = None
    trouble: str | None = None
    while True:
        reading.arrived.wait(SILENT_SECONDS)
        reading.arrived.clear()
        reading.check()
        seen = reading.seen
        if seen.trouble != trouble:
            trouble = seen.trouble
            print(trouble or f"{what} can be read again", flush=True)
        if seen.look is not None and seen.look is not last:
            for line in changes(last, seen.look):
                print(line, flush=True)
            last = seen.look
        if seen.is_settled:
            return True
