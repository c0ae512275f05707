"""Looking on until there is nothing more to see: threads that read, a screen or lines that show it."""

import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeline.process import interruptible

SILENT_SECONDS = 10.0
"""Seconds after which an unfinished look is reported: the file system does not answer."""
_REST_FACTOR, _LONGEST_REST = 4.0, 60.0
"""Rest after a look, in multiples of its duration: looks at thousands of shards take long; most seconds."""
_Look = TypeVar("_Look")


@dataclass(frozen=True)
class Seen(Generic[_Look]):
    """The newest of what was read."""

    look: _Look | None = None
    trouble: str | None = None
    """Reason why the last try to read failed."""
    is_settled: bool = False
    """Whether two looks in a row say that nothing of it will change any more."""


class Background(ABC, Generic[_Look]):
    """Threads that read, so that what does not answer blocks no key; :attr:`seen` may be read at any time."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        """Seconds between two looks."""
        self.seen: Seen[_Look] = Seen()
        self.error: BaseException | None = None
        self.is_paused = False
        self.began: float | None = None
        """Monotonic time at which the present look began; None between looks."""
        self.arrived = threading.Event()
        """Event that is set whenever there is something new in :attr:`seen`."""
        self._stop = threading.Event()

    @abstractmethod
    def look(self) -> None:
        """Read once, and keep what was seen; what the file system refuses is reported, and tried again."""

    def targets(self) -> Sequence[Callable[[], None]]:
        """Return what threads do."""
        return [self._read_on]

    def start(self) -> None:
        """Start the threads, as daemons: a file system that hangs must not keep the program from ending."""
        for target in self.targets():
            threading.Thread(target=self._guarded, args=(target,), daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def check(self) -> None:
        """Raise in the caller's thread the error that ended one of ours."""
        if self.error:
            raise self.error

    def _guarded(self, target: Callable[[], None]) -> None:
        """Run a thread's target; an unexpected error ends the view, not just the thread."""
        try:
            target()
        except BaseException as error:
            self.error = error
            self.arrived.set()

    def _read_on(self) -> None:
        while not self._stop.is_set():
            started = self.began = time.monotonic()
            if not self.is_paused:
                self.look()
                self.arrived.set()
            self.began, took = None, time.monotonic() - started
            self.rest(min(max(self.interval, _REST_FACTOR * took), _LONGEST_REST))

    def rest(self, seconds: float) -> None:
        """Wait until the next look is due, or the view ends."""
        self._stop.wait(seconds)


def look_on(
    reading: Background[_Look],
    what: str,
    draw: Callable[[], bool],
    changes: Callable[[_Look | None, _Look], Iterable[str]],
) -> bool:
    """Show what is read until it has ended (True), or the person quits (False).

    Args:
        what: what is read, for people.
        draw: shows it on a screen.
        changes: returns lines on what has changed between two looks, where no screen can be drawn.
    """
    reading.start()
    try:
        with interruptible():
            return draw() if _has_terminal() else _tell(reading, what, changes)
    except KeyboardInterrupt:  # one way to quit
        return False
    finally:
        reading.stop()


def _has_terminal() -> bool:
    """Whether a screen can be drawn where this process prints."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _tell(
    reading: Background[_Look], what: str, changes: Callable[[_Look | None, _Look], Iterable[str]]
) -> bool:
    """Print a line for each change, until nothing will change any more; then return True."""
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
