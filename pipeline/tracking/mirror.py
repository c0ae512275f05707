"""Bring W&B to what metrics.jsonl says: exactly one row per iteration, whatever was killed before.

This is a process of its own, ``python -m pipeline.tracking.mirror RUN MODE``: W&B may be slow, down or refuse
without training noticing. It first asks what W&B has (the server, or the segments that count; see
:mod:`pipeline.tracking.state`), sends the rows that are missing, and follows metrics.jsonl while its standard
input is open. It answers in JSON lines on standard output: ``{"note": ...}``, and at the end
``{"done": ...}`` with the fields of :class:`Mirrored`, or ``{"refused": ..., "fault": ...}``.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType

from pipeline.config.schema import WandbMode
from pipeline.run import journal
from pipeline.run.benchmarks import read_measured
from pipeline.run.directory import Run, load_run
from pipeline.run.journal import Row
from pipeline.run.lease import HEARTBEAT_SECONDS, LeaseHeld, hold
from pipeline.tracking.client import Opened, held_by_server, measured_rows, number_of, open_run
from pipeline.tracking.place import keep_entity
from pipeline.tracking.refusal import RunRefused
from pipeline.tracking.state import (
    Offline,
    forget_rows,
    mark_synced,
    offline_lease,
    online_lease,
    read_offline,
    read_online,
    remove_unlisted,
    with_segment,
    write_state,
)

_PATIENCE = 150.0
"""Seconds to wait for another writer to W&B; longer than the lease of one that died on another host lasts."""


@dataclass(frozen=True)
class Mirrored:
    """Result of one mirroring."""

    mode: str
    """Mode: online or offline."""
    rows: int
    """Rows in metrics.jsonl."""
    had: int
    """Rows that W&B had before."""
    sent: int
    missing: tuple[int, ...] = ()
    """Iterations that the server has not confirmed."""
    twice: tuple[int, ...] = ()
    """Iterations that the server has more than once: another program sent them."""
    removed: int = 0
    """Removed segments that killed writers left unfinished."""
    marked: int = 0
    """Segments marked so that ``wandb sync`` skips them, since the server has their rows."""
    url: str = ""


@dataclass
class _Opening:
    run: Run
    opened: Opened
    sent: list[int] = field(default_factory=list, init=False)

    def log(self, rows: list[Row]) -> None:
        for row in rows:
            self.opened.log(self.run, row)
            self.sent.append(number_of(row))


@dataclass
class ToSegment(_Opening):
    """Target that is a new offline segment; it replaces earlier ones when there are many."""

    state: Offline
    replaced: Offline
    removed: int

    @property
    def held(self) -> frozenset[int]:
        """Iterations that W&B had when this was opened."""
        confirmed = range(self.run.plan.start + 1, read_online(self.run.paths).arrived + 1)
        return (self.state.iterations | frozenset(confirmed)) - self.replaced.iterations

    @staticmethod
    @contextlib.contextmanager
    def open(run: Run) -> "Iterator[tuple[ToSegment, Callable[[], None]]]":
        with hold(offline_lease(run.paths), _PATIENCE) as lease:
            state = read_offline(run.paths)
            removed = remove_unlisted(run.paths, state.segments)
            opened = open_run(run, WandbMode.OFFLINE)
            yield ToSegment(run, opened, state, state.excess(run.paths), removed), lease.beat

    def close(self, rows: list[Row], exit_code: int) -> Mirrored:
        """Finish and report; ``rows`` are all of metrics.jsonl."""
        had = len(self.held)
        self.opened.handle.finish(exit_code=exit_code)
        if self.sent:
            name = self.opened.folder.name
            self.state = with_segment(self.state, name, self.sent, without=self.replaced.segments)
            write_state(self.run.paths, self.state)
        remove_unlisted(self.run.paths, self.state.segments)
        return Mirrored(str(WandbMode.OFFLINE), len(rows), had, len(self.sent), removed=self.removed)


@dataclass
class ToServer(_Opening):
    """Target that is W&B's server, which is asked what it has."""

    before: Counter[int]

    @property
    def held(self) -> frozenset[int]:
        return frozenset(self.before)

    @staticmethod
    @contextlib.contextmanager
    def open(run: Run) -> "Iterator[tuple[ToServer, Callable[[], None]]]":
        with hold(online_lease(run.paths), _PATIENCE) as lease:
            opened = open_run(run, WandbMode.ONLINE)
            keep_entity(run, opened.handle.entity)
            held = held_by_server(opened, measures=bool(run.plan.benchmark_every))
            yield ToServer(run, opened, held), lease.beat

    def log(self, rows: list[Row]) -> None:
        state = read_online(self.run.paths)
        newest = max(number_of(row) for row in rows)
        if newest > state.sent:
            write_state(self.run.paths, replace(state, sent=newest))
        super().log(rows)

    def close(self, rows: list[Row], exit_code: int) -> Mirrored:
        self.opened.handle.finish(exit_code=exit_code)
        after = held_by_server(self.opened, measures=bool(self.run.plan.benchmark_every))
        wanted = [number_of(row) for row in rows]
        missing = tuple(i for i in wanted if i not in after)
        of_rows = [i for i in missing if i > 0]
        arrived = of_rows[0] - 1 if of_rows else max([0, *wanted])
        measured = sum(i < 0 and i in after for i in wanted)
        state = replace(read_online(self.run.paths), arrived=arrived, measured=measured)
        write_state(self.run.paths, state)
        cut = 0
        if not missing:
            shutil.rmtree(self.opened.folder, ignore_errors=True)  # its own log: thousands would pile up
            cut = self._remove_cut_segments()
        return Mirrored(
            str(WandbMode.ONLINE),
            len(rows),
            len(self.held.intersection(wanted)),
            len(self.sent),
            missing,
            tuple(sorted(i for i, count in after.items() if count > 1)),
            removed=cut,
            marked=self._mark(after),
            url=self.opened.handle.url or "",
        )

    def _remove_cut_segments(self) -> int:
        """Remove segments whose rows have arrived by another way. Returns how many."""
        try:
            with hold(offline_lease(self.run.paths)):
                return remove_unlisted(self.run.paths, read_offline(self.run.paths).segments)
        except LeaseHeld:  # a driver is writing one just now
            return 0

    def _mark(self, after: Counter[int]) -> int:
        """Keep ``wandb sync`` from uploading what the server has by now."""
        segments = read_offline(self.run.paths).segments.items()
        known = [self.run.paths.wandb / name for name, held in segments if after.keys() >= set(held)]
        for folder in known:
            mark_synced(folder)
        return len(known)


Target = ToServer | ToSegment
"""Destination of rows."""


@dataclass
class Once:
    """Feed of the rows that are there; none will follow."""

    exit_code: int = 0
    """Exit code of the run, once no more rows will follow."""

    def goes_on(self, beat: Callable[[], None]) -> bool:
        """Wait for more rows; false when none will follow."""
        return False


@dataclass
class DriverFeed:
    """Feed from a driver's pipe: a line per new row, ``end CODE``, then the pipe closes, also by a kill."""

    stream: int
    stop: int
    """Descriptor that is readable once this process was asked to end."""
    exit_code: int = 1
    _line: str = field(default="", init=False)

    def goes_on(self, beat: Callable[[], None]) -> bool:
        while not (ready := select.select([self.stream, self.stop], [], [], HEARTBEAT_SECONDS)[0]):
            beat()
        if self.stop in ready:
            return False
        text = os.read(self.stream, 1 << 16).decode()
        *lines, self._line = (self._line + text).split("\n")
        codes = [int(line.removeprefix("end ")) for line in lines if line.startswith("end ")]
        self.exit_code = codes[-1] if codes else self.exit_code
        return bool(text)


Feed = Once | DriverFeed
"""Signal of whether metrics.jsonl may still grow."""


def mirror(run: Run, mode: WandbMode, feed: Feed, note: Callable[[str], None]) -> Mirrored:
    """Send the rows that W&B lacks, now and for as long as ``feed`` goes on.

    Raises:
        LeaseHeld: another writer has been at it for minutes.
        RunRefused: as the run is set, W&B will never take it.
        wandb.errors.Error, and whatever else its client raises: W&B refuses or cannot be reached.
    """
    kind: type[Target] = ToServer if mode is WandbMode.ONLINE else ToSegment
    with kind.open(run) as (target, beat):
        rows = read_rows(run)
        last = max([run.plan.start, *map(number_of, rows)])
        if taken_back := [i for i in target.held if i > last]:
            target.close(rows, 0)
        else:
            return follow(run, target, feed, beat)
    note(f"W&B has rows that were taken back (from iteration {min(taken_back)} on): a new W&B run has all")
    forget_rows(run.paths)
    with kind.open(run) as (target, beat):
        return follow(run, target, feed, beat)


def follow(run: Run, target: Target, feed: Feed, beat: Callable[[], None]) -> Mirrored:
    """Send what is missing, again whenever more has come, and close."""
    known = set(target.held)
    goes_on = True
    while goes_on:
        send(run, target, known)
        beat()
        goes_on = feed.goes_on(beat)
    send(run, target, known)
    return target.close(read_rows(run), feed.exit_code)


def send(run: Run, target: Target, known: set[int]) -> None:
    """Log the rows that are not in ``known``, and add them to it."""
    if rows := [row for row in read_rows(run) if number_of(row) not in known]:
        target.log(rows)
        known.update(map(number_of, rows))


def read_rows(run: Run) -> list[Row]:
    """Read metrics.jsonl, the last line of an iteration counts; then what evaluate.command wrote."""
    rows = {int(row["iteration"]): row for row in journal.read(run.paths.metrics) if "iteration" in row}
    measured = read_measured(run.paths) if run.plan.benchmark_every else ()
    return [*(rows[iteration] for iteration in sorted(rows)), *measured_rows(measured)]


def closed_by_sigterm() -> int:
    """Return a descriptor that is readable from SIGTERM on: closing W&B in order keeps what was sent."""
    stop, told = os.pipe()

    def terminate(number: int, frame: FrameType | None) -> None:
        os.write(told, b"x")

    signal.signal(signal.SIGTERM, terminate)
    return stop


def main() -> None:
    """Run ``python -m pipeline.tracking.mirror RUN MODE [--once]``."""

    def say(**what: object) -> None:
        print(json.dumps(what), flush=True)

    run, mode = load_run(Path(sys.argv[1])), WandbMode(sys.argv[2])
    feed = Once() if "--once" in sys.argv else DriverFeed(sys.stdin.fileno(), closed_by_sigterm())
    try:
        say(done=asdict(mirror(run, mode, feed, lambda text: say(note=text))))
    except RunRefused as error:
        say(refused=str(error), fault=error.fault)
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # everything is closed; the client's own exit waits for its service without a limit


if __name__ == "__main__":
    main()
