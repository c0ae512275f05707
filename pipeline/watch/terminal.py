"""The terminal: keys, and a screen that is drawn when something changed. Restored at the end."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pipeline.config.job_kinds import parts_of
from pipeline.watch.look import Lane, Look
from pipeline.watch.reading import SILENT_SECONDS, Reading, Wish
from pipeline.watch.screen import Page, View, chosen, screen, to_ascii

_TICK_SECONDS = 0.2
"""Seconds within which a new size, or something that was read, is noticed; keys are noticed at once."""
_ENDED_SECONDS = 0.5
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
        signal.signal(signal.SIGTSTP, lambda number, frame: window.leave())
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
    _frozen: Look | None = field(default=None, repr=False)

    is_leaving: bool = False

    def leave(self) -> None:
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
        self.live.update(Group(*(_unwrapped(line) for line in lines)), refresh=True)
        self._drawn = state

    def _look(self) -> Look | None:
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
            self.reading.want(Wish(self._wanted()))


def pressed(view: View, look: Look | None, key: str) -> View:
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
    found = next((lane for lane in _after(lanes, now) if parts_of(lane.key[1])[0] == stage), None)
    return replace(view, selected=found.key) if found else view


def _after(lanes: Sequence[Lane], now: Lane) -> list[Lane]:
    """Return all lanes, those after the chosen one first: the same key again goes to the next of its kind."""
    index = lanes.index(now) + 1
    return [*lanes[index:], *lanes[:index]]


def _unwrapped(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "crop"
    return line


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
    before: list[Any] = field(default_factory=list)
    """Settings of the terminal, to be put back."""

    @staticmethod
    def of_stdin() -> "Keyboard":
        if not sys.stdin.isatty():
            return Keyboard(None)
        return Keyboard(sys.stdin.fileno(), termios.tcgetattr(sys.stdin.fileno()))

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
    keys = []
    while text:
        length = 1
        if text[:2] in ("\x1b[", "\x1bO"):
            ends = (i for i, c in enumerate(text[2:], 3) if "@" <= c <= "~")
            length = next(ends, len(text))
        keys.append(text[:length])
        text = text[length:]
    return keys


@contextlib.contextmanager
def keys() -> Iterator[Keyboard]:
    """Provide the keyboard for the block, and restore the terminal."""
    keyboard = Keyboard.of_stdin()
    previous = signal.getsignal(signal.SIGTSTP)
    try:
        keyboard.take()
        yield keyboard
    finally:
        keyboard.give_back()
        signal.signal(signal.SIGTSTP, previous)
