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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline.status.snapshot import Status
from pipeline.watch.reading import SILENT_SECONDS, Reading
from pipeline.watch.screen import Page, View, chosen, screen, to_ascii

_TICK_SECONDS = 0.2
"""Seconds within which a new size, or something that was read, is noticed; keys are noticed at once."""
STAGE_KEYS = {"r": "rollout", "s": "score", "w": "reward", "u": "update", "e": "evaluate"}
_ARROWS = {"\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down"}


class Quit(Exception):
    """The person asked to quit."""


def show(reading: Reading) -> bool:
    """Show the run until it has ended, or the person quits. True if it has ended.

    Raises:
        KeyboardInterrupt: Ctrl-C; the terminal is as it was.
    """
    console = Console(file=sys.stdout, highlight=False, soft_wrap=False)
    with keys() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        window = Window(reading, console, live)
        signal.signal(signal.SIGTSTP, window.leave)
        while True:
            reading.check()
            if reading.seen.is_settled and not window.view.is_paused:
                return True
            window.draw()
            if window.is_leaving:
                window.step_aside(keyboard)
            try:
                window.take(keyboard.read(_TICK_SECONDS))
            except Quit:
                return False


@dataclass
class Window:
    """Contents of the screen."""

    reading: Reading
    console: Console
    live: Live
    view: View = field(default_factory=View)
    _drawn: tuple[object, ...] = ()
    _frozen: Status | None = None
    is_leaving: bool = False

    def leave(self, *ignored: object) -> None:
        """Note that Ctrl-Z was pressed."""
        self.is_leaving = True

    def step_aside(self, keyboard: "Keyboard") -> None:
        """Give the terminal back until the shell continues this process."""
        self.live.stop()
        keyboard.give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        keyboard.take()
        self.live.start()
        self.is_leaving, self._drawn = False, ()

    def draw(self) -> None:
        """Draw only on a change: needless drawing costs bandwidth on a slow connection, and attention."""
        width, height = _size(self.console)
        look, view = self._look(), self._view()
        state = (look, view, width, height)
        if state == self._drawn:
            return
        lines = screen(look, view, width, height)
        if self.console.options.ascii_only:
            lines = [to_ascii(line) for line in lines]
        self.console.size = (width, height)
        self.live.update(Text("\n", no_wrap=True, overflow="crop").join(lines), refresh=True)
        self._drawn = state

    def _look(self) -> Status | None:
        return self._frozen if self.view.is_paused else self.reading.seen.look

    def _view(self) -> View:
        seen = self.reading.seen
        trouble, began = seen.trouble, self.reading.began
        if began and (silent := time.monotonic() - began) > SILENT_SECONDS:
            trouble = f"the file system has not answered for {10 * int(silent // 10)} s"
        log = self.view.log if self.view.is_paused else seen.log
        return replace(self.view, log=log if self._wanted() == seen.log_of else None, trouble=trouble)

    def _wanted(self) -> tuple[int, str] | None:
        return self.view.selected if self.view.page is Page.LOG else None

    def take(self, keys: Sequence[str]) -> None:
        """Do what the keys say. Raises Quit."""
        for key in keys:
            if key == "q":
                raise Quit
            if key == "p":
                self._frozen = self.reading.seen.look
                self.view = replace(self.view, is_paused=not self.view.is_paused, log=self.reading.seen.log)
                self.reading.is_paused = self.view.is_paused
            else:
                self.view = pressed(self.view, self._look(), key)
            self.reading.want_log(self._wanted())


def pressed(view: View, look: Status | None, key: str) -> View:
    """Return the view after a key. Pure."""
    if key == "?":
        return replace(view, page=Page.RUN if view.page is Page.HELP else Page.HELP)
    if key == "\x1b" or (key == "l" and view.page is Page.LOG):
        return replace(view, page=Page.RUN)
    lanes = look.lanes if look else ()
    now = chosen(look, view)
    if now is None:
        return view
    if key == "l":  # the log stays when the run has gone on to other lanes
        return replace(view, page=Page.LOG, selected=now.key)
    if key in _ARROWS:
        step = -1 if _ARROWS[key] == "up" else 1
        index = max(0, min(len(lanes) - 1, lanes.index(now) + step))
        return replace(view, selected=lanes[index].key)
    stage = STAGE_KEYS.get(key)
    after = lanes.index(now) + 1  # the same key again goes to the next of its kind
    others = [*lanes[after:], *lanes[:after]]
    found = next((lane for lane in others if lane.key[1].partition("-")[0] == stage), None)
    return replace(view, selected=found.key) if found else view


def _size(console: Console) -> tuple[int, int]:
    """Return columns and lines now; COLUMNS and LINES say what they were when the shell started."""
    try:
        size = os.get_terminal_size(console.file.fileno())
    except OSError:
        return 80, 24
    return (size.columns or 80, size.lines or 24)


@dataclass(frozen=True)
class Keyboard:
    """Keys as they are pressed. Without a terminal on standard input there are none."""

    descriptor: int | None
    before: list[Any]
    """Settings of the terminal, to be put back."""

    def take(self) -> None:
        """Let keys come without Enter and without echo."""
        if self.descriptor is not None:
            tty.setcbreak(self.descriptor)

    def give_back(self) -> None:
        if self.descriptor is not None:
            termios.tcsetattr(self.descriptor, termios.TCSADRAIN, self.before)

    def read(self, seconds: float) -> list[str]:
        """Return the keys that were pressed, waiting up to ``seconds`` for the first. Raises Quit."""
        if self.descriptor is None:
            time.sleep(seconds)
            return []
        ready, _, _ = select.select([self.descriptor], [], [], seconds)
        if not ready:
            return []
        text = os.read(self.descriptor, 256)
        if not text:
            raise Quit  # the terminal has gone
        return split_keys(text.decode(errors="ignore"))


def split_keys(text: str) -> list[str]:
    """Split into characters, and the sequences that arrow keys send as one. Pure."""
    return re.findall(r"\x1b[\[O][^@-~]*[@-~]?|.", text, re.DOTALL)


@contextlib.contextmanager
def keys() -> Iterator[Keyboard]:
    """Provide the keyboard for the block, and restore the terminal."""
    descriptor = sys.stdin.fileno() if sys.stdin.isatty() else None
    keyboard = Keyboard(descriptor, [] if descriptor is None else termios.tcgetattr(descriptor))
    previous = signal.getsignal(signal.SIGTSTP)
    try:
        keyboard.take()
        yield keyboard
    finally:
        keyboard.give_back()
        signal.signal(signal.SIGTSTP, previous)
