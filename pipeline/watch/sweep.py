"""``slurm-ppo watch`` of a sweep: its runs, a line each, on a screen or as lines that say what changed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from pipeline.text import clock, number, printable
from pipeline.watch.loop import Background, Seen, look_on
from pipeline.watch.screen import LEAST_HEIGHT, LEAST_WIDTH, framed
from pipeline.watch.terminal import STEPS, Window, show

_KEYS = "q quit   up/down other runs"
_STYLES = {"running": "cyan", "failed": "bold red", "corrupt": "bold red", "not begun": "dim"}


class SweepReading(Background[SweepStatus]):
    """A thread that reads the sweep."""

    def __init__(self, root: Path, interval: float, live_ids: LiveIds) -> None:
        super().__init__(interval)
        self.root, self._live_ids = root, live_ids

    def look(self) -> None:
        """Read once; what the file system refuses is reported, and tried again."""
        try:
            status = read_sweep_status(self.root, self._live_ids)
        except OSError as error:
            self.seen = replace(self.seen, trouble=f"cannot read the sweep now: {error}")
            return
        before = self.seen.look
        is_over = has_ended(status) and before is not None and has_ended(before)
        self.seen = Seen(status, is_settled=is_over or status.state == "complete")


def has_ended(status: SweepStatus) -> bool:
    """Whether nothing of the sweep is active. Pure."""
    return status.driver is None and not any(map(is_at_work, status.entries))


def watch_sweep(root: Path, interval: float, live_ids: LiveIds) -> str:
    """Show a sweep until nothing of it is active, or the person quits. Changes nothing.

    Args:
        interval: seconds between two looks.

    Returns:
        The sweep's state, as :attr:`pipeline.status.sweep.SweepStatus.state`.

    Raises:
        SweepError: the manifest cannot be read.
    """
    reading = SweepReading(root, interval, live_ids)
    is_over = look_on(reading, "the sweep", lambda: show(SweepWindow(reading)), sweep_changes)
    status = reading.seen.look
    if status is None:
        return "unknown"
    goes_on = "; it goes on without this view" if status.state == "running" else ""
    print(describe_sweep(status) if is_over else f"{standing(status)}{goes_on}")
    return status.state


# --- a line for each change ------------------------------------------------------------------------------


def sweep_changes(before: SweepStatus | None, after: SweepStatus) -> list[str]:
    """Return lines on what has changed between two looks; none where nothing has. Pure."""
    return [f"{clock(after.time)} {line}" for line in _news(before, after)]


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


class SweepWindow(Window[SweepReading]):
    """A sweep's runs, through which the person moves."""

    def __init__(self, reading: SweepReading) -> None:
        super().__init__(reading)
        self.first = 0

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


def sweep_screen(seen: Seen[SweepStatus], first: int, width: int, height: int) -> list[Text]:
    """Render exactly ``height`` lines of at most ``width`` columns. Pure.

    Args:
        first: number of runs above the first that is shown, where not all of them fit.
    """
    width, height = max(width, LEAST_WIDTH), max(height, LEAST_HEIGHT)
    lines, where = _page(seen.look, first, height - 2) if seen.look else ([Text("reading ...")], "")
    trouble = seen.trouble or (f"as of {clock(seen.look.time)}" if seen.look else "")
    bottom = [Text(trouble, "bold" if seen.trouble else "dim"), Text(f"{_KEYS}{where}", "dim")]
    return framed(lines, bottom, width, height)


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
