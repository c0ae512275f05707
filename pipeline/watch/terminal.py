"""The terminal: keys, and a screen that is drawn when something changed. Restored at the end."""

import contextlib
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline.watch.loop import Background
from pipeline.watch.screen import to_ascii

_Reading = TypeVar("_Reading", bound=Background[Any])
_TICK_SECONDS = 0.2
"""Seconds within which a new size, or something that was read, is noticed; keys are noticed at once."""
STEPS = {"\x1b[A": -1, "\x1bOA": -1, "k": -1, "\x1b[B": 1, "\x1bOB": 1, "j": 1}


def show(window: "Window[Any]") -> bool:
    """Show a window until what it shows has ended, or the person quits. True if it has ended.

    Raises:
        KeyboardInterrupt: Ctrl-C, or SIGHUP; the terminal is as it was.
    """
    before_stop = signal.signal(signal.SIGTSTP, window.leave)
    before_hangup = signal.getsignal(signal.SIGHUP)
    if before_hangup is signal.SIG_DFL:  # under nohup it stays ignored
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        while (has_ended := window.show()) is None:
            os.kill(os.getpid(), signal.SIGSTOP)
        return has_ended
    finally:
        signal.signal(signal.SIGTSTP, before_stop)
        signal.signal(signal.SIGHUP, before_hangup)


class Window(ABC, Generic[_Reading]):
    """Contents of the screen, and keys."""

    def __init__(self, reading: _Reading) -> None:
        self.reading = reading
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=False)
        self.is_leaving = False
        self._drawn: tuple[object, ...] = ()

    @abstractmethod
    def content(self, width: int, height: int) -> tuple[object, ...]:
        """Return all that the lines are made of: where it is what it was, nothing is drawn."""

    @abstractmethod
    def lines(self, width: int, height: int) -> Sequence[Text]:
        """Return the lines of a screen."""

    @abstractmethod
    def take(self, keys: Sequence[str]) -> bool:
        """Do what the keys say. Returns whether to go on."""

    def leave(self, *ignored: object) -> None:
        """Note that Ctrl-Z was pressed."""
        self.is_leaving = True

    def show(self) -> bool | None:
        """Draw and take keys until there is nothing more to see (True), q (False) or Ctrl-Z (None)."""
        self.is_leaving, self._drawn = False, ()
        with keys() as keyboard, Live(console=self.console, screen=True, auto_refresh=False) as live:
            while not self.is_leaving:
                self.reading.check()
                if self.reading.seen.is_settled and not self.reading.is_paused:
                    return True
                self.draw(live)
                if not self.take(read_keys(keyboard, _TICK_SECONDS)):
                    return False
        return None

    def draw(self, live: Live) -> None:
        """Draw only on a change: needless drawing costs bandwidth on a slow connection, and attention."""
        width, height = _size(self.console)
        content = (*self.content(width, height), width, height)
        if content == self._drawn:
            return
        lines = self.lines(width, height)
        if self.console.options.ascii_only:
            lines = [to_ascii(line) for line in lines]
        self.console.size = (width, height)
        live.update(Text("\n", no_wrap=True, overflow="crop").join(lines), refresh=True)
        self._drawn = content


def _size(console: Console) -> tuple[int, int]:
    """Return columns and lines now; COLUMNS and LINES say what they were when the shell started."""
    try:
        size = os.get_terminal_size(console.file.fileno())
    except OSError:
        return 80, 24
    return (size.columns or 80, size.lines or 24)


@contextlib.contextmanager
def keys() -> Iterator[int | None]:
    """Let keys come without Enter and without echo, in the block. Gives the descriptor to read them from.

    Without a terminal on standard input there are none.
    """
    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def read_keys(descriptor: int | None, seconds: float) -> list[str]:
    """Return the keys that were pressed, waiting up to ``seconds`` for the first."""
    if descriptor is None:
        time.sleep(seconds)
        return []
    if not select.select([descriptor], [], [], seconds)[0]:
        return []
    text = os.read(descriptor, 256)
    return split_keys(text.decode(errors="ignore")) if text else ["q"]  # none: the terminal has gone


def split_keys(text: str) -> list[str]:
    """Split into characters, and the sequences that arrow keys send as one. Pure."""
    return re.findall(r"\x1b[\[O][^@-~]*[@-~]?|.", text, re.DOTALL)
