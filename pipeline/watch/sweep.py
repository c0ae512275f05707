"""``slurm-ppo watch`` of a sweep: its runs, a line each, on a screen or as lines that say what changed."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.text import Text

from pipeline.status.listing import Entry, LiveIds
from pipeline.status.sweep import (
    SweepStatus,
    closing,
    describe_sweep,
    is_at_work,
    read_sweep_status,
    run_lines,
    standing,
    state_in_words,
)
from pipeline.status.text import clock
from pipeline.text import number, printable
from pipeline.watch.loop import look_on, tell_changes
from pipeline.watch.screen import LEAST_HEIGHT, LEAST_WIDTH
from pipeline.watch.terminal import STEPS, Window, show

_REST_FACTOR = 4.0
"""Rest after a look, in multiples of its duration: a look at a thousand runs takes a second or two."""
_KEYS = "q quit   up/down other runs"
_STYLES = {"running": "cyan", "failed": "bold red", "spoilt": "bold red", "not begun": "dim"}


@dataclass(frozen=True)
class SeenSweep:
    """The newest of everything that was read."""

    look: SweepStatus | None = None
    time: float = 0.0
    """Unix time of that look."""
    trouble: str | None = None
    """Reason why the last try to read failed."""
    is_settled: bool = False
    """Whether two looks in a row say that nothing of the sweep is at work."""


class SweepReading:
    """A thread that reads the sweep, so that what does not answer blocks no key."""

    def __init__(self, root: Path, interval: float, live_ids: LiveIds) -> None:
        self.root, self.interval, self._live_ids = root, interval, live_ids
        self.seen = SeenSweep()
        self.error: BaseException | None = None
        self.arrived = threading.Event()
        """Event that is set whenever there is something new in :attr:`seen`."""
        self._stop = threading.Event()

    def start(self) -> None:
        """Start the thread, as a daemon: a file system that hangs must not keep the program from ending."""
        threading.Thread(target=self._read_on, daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def check(self) -> None:
        """Raise in the caller's thread the error that ended ours."""
        if self.error:
            raise self.error

    def look(self) -> None:
        """Read once; what the file system refuses is reported, and tried again."""
        try:
            status = read_sweep_status(self.root, self._live_ids)
        except OSError as error:
            self.seen = replace(self.seen, trouble=f"cannot read the sweep now: {error}")
            return
        before = self.seen.look
        is_over = has_ended(status) and before is not None and has_ended(before)
        is_settled = is_over or status.state == "complete"
        self.seen = SeenSweep(status, time.time(), is_settled=is_settled)

    def _read_on(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                self.look()
            except BaseException as error:  # raised again by check
                self.error = error
                return
            finally:
                self.arrived.set()
            self._stop.wait(max(self.interval, _REST_FACTOR * (time.monotonic() - started)))


def has_ended(status: SweepStatus) -> bool:
    """Whether nothing of the sweep is at work. Pure."""
    return status.driver is None and not any(map(is_at_work, status.entries))


def watch_sweep(root: Path, interval: float, live_ids: LiveIds) -> str:
    """Show a sweep until nothing of it is at work, or the person quits. Changes nothing.

    Args:
        interval: seconds between two looks.

    Returns:
        The sweep's state, as :attr:`pipeline.status.sweep.SweepStatus.state`.

    Raises:
        SweepError: the manifest cannot be read.
    """
    reading = SweepReading(root, interval, live_ids)
    is_over = look_on(
        reading,
        lambda: show(SweepWindow(reading)),
        lambda: tell_changes(
            reading,
            "the sweep",
            lambda before, after: sweep_changes(before, after, reading.seen.time),
        ),
    )
    status = reading.seen.look
    if status is None:
        return "unknown"
    goes_on = "; it goes on without this view" if status.state == "running" else ""
    print(describe_sweep(status) if is_over else f"{standing(status)}{goes_on}")
    return status.state


# --- a line for each change ------------------------------------------------------------------------------


def sweep_changes(before: SweepStatus | None, after: SweepStatus, now: float) -> list[str]:
    """Return lines on what has changed between two looks; none where nothing has. Pure."""
    return [f"{clock(now)} {line}" for line in _news(before, after)]


def _news(before: SweepStatus | None, after: SweepStatus) -> Iterator[str]:
    if before is None:
        yield standing(after)
    known = {entry.run: _in_words(entry) for entry in before.entries} if before else {}
    for entry in after.entries:
        if (words := _in_words(entry)) != known.get(entry.run, ""):
            yield f"{printable(Path(entry.run).name)}: {words}"
    if before and after.best and (before.best is None or after.best.run != before.best.run):
        yield f"best so far: {printable(after.best.in_words)}"


def _in_words(entry: Entry) -> str:
    """Describe where a run stands; empty for one that has not begun: the first line counts those."""
    if entry.state == "not begun":
        return ""
    reward = "" if entry.reward is None else f", reward {number(entry.reward, 3)}"
    done = "" if entry.iterations is None else f", {entry.iteration}/{entry.iterations} iterations"
    return f"{entry.state}{done}{reward}"


# --- a screen --------------------------------------------------------------------------------------------


class SweepWindow(Window):
    """A sweep's runs, through which the person moves."""

    def __init__(self, reading: SweepReading) -> None:
        super().__init__(reading)
        self.reading, self.first = reading, 0

    def content(self, width: int, height: int) -> tuple[object, ...]:
        return self.reading.seen, self.first

    def lines(self, width: int, height: int) -> Sequence[Text]:
        return sweep_screen(self.reading.seen, self.first, width, height)

    def take(self, keys: Sequence[str]) -> bool:
        status = self.reading.seen.look
        last = max(0, len(status.entries) - 1) if status else 0
        for key in keys:
            if key == "q":
                return False
            self.first = max(0, min(last, self.first + STEPS.get(key, 0)))
        return True


def sweep_screen(seen: SeenSweep, first: int, width: int, height: int) -> list[Text]:
    """Render exactly ``height`` lines of at most ``width`` columns. Pure.

    Args:
        first: number of runs above the first that is shown, where not all of them fit.
    """
    width, height = max(width, LEAST_WIDTH), max(height, LEAST_HEIGHT)
    lines, where = _page(seen.look, first, height - 2) if seen.look else ([Text("reading ...")], "")
    lines += [Text()] * (height - 2 - len(lines))
    trouble = seen.trouble or (f"as of {clock(seen.time)}" if seen.time else "")
    shown = [*lines, Text(trouble, "bold" if seen.trouble else "dim"), Text(f"{_KEYS}{where}", "dim")]
    for line in shown:
        line.truncate(width, overflow="ellipsis")
    return shown


def _page(status: SweepStatus, first: int, height: int) -> tuple[list[Text], str]:
    """Return the lines between top and bottom, and which runs they are where these are not all."""
    titles, *rows = run_lines(status)
    end = [Text(), *map(Text, closing(status)[:-1])]
    head = [Text(str(status.root), "bold"), Text(state_in_words(status), "bold"), Text(), Text(titles, "dim")]
    room = max(1, height - len(head) - len(end))
    first = max(0, min(first, len(rows) - room))
    named = zip(status.entries[first:], rows[first : first + room], strict=False)
    shown = [Text(row, _STYLES.get(entry.state, "")) for entry, row in named]
    where = "" if len(rows) <= room else f"   {first + 1}-{first + len(shown)} of {len(rows)}"
    return [*head, *shown, *end][:height], where
