"""Bring a destination to what metrics.jsonl says: every row once, in order, whatever was killed before.

This is a process of its own, ``python -m pipeline.tracking.mirror RUN``: W&B may be slow, down or refuse
without training noticing. The destination says which rows it has; the others are sent, and
metrics.jsonl is followed while standard input is open. It answers in JSON lines on standard output:
``{"note": ...}``, and at the end ``{"done": ...}`` with the fields of :class:`Mirrored`, or
``{"refused": ..., "fault": ...}``.
"""

import argparse
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Protocol

from pipeline.config.schema import WandbMode
from pipeline.run.directory import Run, load_run
from pipeline.run.journal import Row
from pipeline.run.lease import HEARTBEAT_SECONDS, hold
from pipeline.tracking.client import open_online, open_run
from pipeline.tracking.destination import Destination, package_problem
from pipeline.tracking.event_files import open_events
from pipeline.tracking.mlflow_client import open_mlflow
from pipeline.tracking.refusal import RunRefused
from pipeline.tracking.state import mirror_lease, published, read_state, write_state

_PATIENCE = 150.0
"""Seconds to wait for another writer to the same; longer than a lease of one that died on another host."""

Note = Callable[[str], None]


@dataclass(frozen=True)
class Mirrored:
    """Result of one mirroring."""

    rows: int
    """Rows of the run, those of evaluate.command included."""
    had: int
    """Rows that were there before, or that an earlier offline run holds."""
    sent: int
    missing: int = 0
    """Rows that the destination has not confirmed."""
    url: str = ""


class Opened(Protocol):
    """A destination that is open for one run of its own, under one id."""

    @property
    def first_step(self) -> int:
        """Number of rows that it held when it was opened: the step of the next."""

    @property
    def url(self) -> str:
        """Address or path for people; empty where there is none."""

    def log(self, run: Run, row: Row, step: int) -> None:
        """Add a row as a step: whole, or such that the next opening completes it."""

    def finish(self, exit_code: int) -> None:
        """Close it. ``exit_code``: the run's."""

    def confirmed(self) -> int:
        """Return the number of rows that it holds, once it is closed."""


@dataclass
class Once:
    """Feed of the rows that are there; no more follow."""

    exit_code: int = 0
    """Exit code of the run, once no more rows follow."""

    def goes_on(self, beat: Callable[[], None]) -> bool:
        """Wait for more rows; false when no more follow."""
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


_OPEN: Mapping[Destination, Callable[[Run], Opened]] = {
    Destination.WANDB: open_online,
    Destination.TENSORBOARD: open_events,
    Destination.MLFLOW: open_mlflow,
}


def mirror(run: Run, to: Destination, feed: Feed, note: Note) -> Mirrored:
    """Send the rows that a destination lacks, now and for as long as ``feed`` goes on.

    Raises:
        LeaseHeld: another writer has been at it for minutes.
        RunRefused: as the run is set, W&B will never take it.
        wandb.errors.Error, and whatever else a client raises: it refuses or cannot be reached.
    """
    with hold(mirror_lease(run.paths, to), _PATIENCE) as lease:
        while True:
            opened = _opened(run, to, note)
            try:
                at = follow(run, to, opened, feed, lease.beat)
                break
            except TakenBack:
                opened.finish(exit_code=0)
        opened.finish(exit_code=feed.exit_code)
        rows, first = published(run), opened.first_step
        arrived = min(opened.confirmed(), at)
        write_state(run.paths, replace(read_state(run.paths, to), confirmed=arrived), to)
        missing = max(0, len(rows) - arrived)
        return Mirrored(len(rows), first, at - first, missing, opened.url)


class TakenBack(Exception):
    """Rows that were sent have gone or changed since."""


def _opened(run: Run, to: Destination, note: Note) -> Opened:
    """Open the run's own run at the destination, a new one where that has what the run has not."""
    rows = _rows_to_send(run, to, note)
    opened = _OPEN[to](run)
    state = read_state(run.paths, to)
    ours = min(len(rows), state.sent) if state.digest else len(rows)  # nothing noted: up to all
    if (there := opened.first_step) > ours:
        opened.finish(exit_code=0)
        note(f"{to.label} has {there} rows, the run {ours}: a new {to.label} run has all")
        write_state(run.paths, read_state(run.paths, to).next_generation(), to)
        opened = _OPEN[to](run)
    return opened


def _rows_to_send(run: Run, to: Destination, note: Note) -> list[Row]:
    """Return the rows; where rows that were sent have gone or changed, they go to a new run there."""
    rows, state = published(run), read_state(run.paths, to)
    if not state.holds(rows):
        note(f"{to.label} has rows that were retracted or changed since: a new {to.label} run has all")
        write_state(run.paths, state.next_generation(), to)
    return rows


def follow(run: Run, to: Destination, opened: Opened, feed: Feed, beat: Callable[[], None]) -> int:
    """Send what is missing, again whenever more has come. Returns the number of rows that are then there."""
    at, goes_on = opened.first_step, True
    while goes_on:
        at = send(run, to, opened, at)
        beat()
        goes_on = feed.goes_on(beat)
    return send(run, to, opened, at)


def send(run: Run, to: Destination, opened: Opened, at: int) -> int:
    """Log the rows from step ``at`` on. Returns the step after the last. Raises TakenBack."""
    rows, state = published(run), read_state(run.paths, to)
    if not state.holds(rows):
        raise TakenBack
    if len(rows) <= at:
        return at
    write_state(run.paths, state.with_sent(rows), to)
    for step, row in enumerate(rows[at:], at):
        opened.log(run, row, step)
    return len(rows)


def carry(run: Run, folder: Path, note: Note) -> Mirrored:
    """Write the rows that W&B lacks, and that no earlier call has written, as an offline run of W&B."""
    with hold(mirror_lease(run.paths), _PATIENCE):
        rows = _rows_to_send(run, Destination.WANDB, note)
        state = read_state(run.paths)
        if state.sent > max(state.confirmed, state.carried):
            note("a writer was ended before it could say what W&B has: a new W&B run has all")
            state = state.next_generation()
            write_state(run.paths, state)
        first = max(state.confirmed, state.carried)
        if first < len(rows):
            folder.mkdir(parents=True, exist_ok=True)
            opened = open_run(run, WandbMode.OFFLINE, folder)
            send(run, Destination.WANDB, opened, first)
            opened.finish(exit_code=0)
            write_state(run.paths, replace(read_state(run.paths), carried=len(rows)))
        return Mirrored(len(rows), first, len(rows) - first)


def closed_by_sigterm() -> int:
    """Return a descriptor that is readable from SIGTERM on: closing in order keeps what was sent."""
    stop, told = os.pipe()

    def terminate(number: int, frame: FrameType | None) -> None:
        os.write(told, b"x")

    signal.signal(signal.SIGTERM, terminate)
    return stop


def main() -> None:
    """Run ``python -m pipeline.tracking.mirror RUN [--to DESTINATION] [--once | --offline DIR]``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Destination, default=Destination.WANDB)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--offline", type=Path)
    asked = parser.parse_args()
    if why := package_problem(asked.to):
        sys.exit(why)

    def say(**what: object) -> None:
        print(json.dumps(what), flush=True)

    def note(text: str) -> None:
        say(note=text)

    run = load_run(asked.run)
    try:
        if asked.offline:
            done = carry(run, asked.offline, note)
        else:
            feed = Once() if asked.once else DriverFeed(0, closed_by_sigterm())
            done = mirror(run, asked.to, feed, note)
        say(done=asdict(done))
    except RunRefused as error:
        say(refused=str(error), fault=error.fault)
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # everything is closed; the client's own exit waits for its service without a limit


if __name__ == "__main__":
    main()
