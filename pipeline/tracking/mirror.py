"""Bring W&B to what metrics.jsonl says: every row once, in order, whatever was killed before.

This is a process of its own, ``python -m pipeline.tracking.mirror RUN``: W&B may be slow, down or refuse
without training noticing. The server says by its last step which rows it has; the others are sent, and
metrics.jsonl is followed while standard input is open. It answers in JSON lines on standard output:
``{"note": ...}``, and at the end ``{"done": ...}`` with the fields of :class:`Mirrored`, or
``{"refused": ..., "fault": ...}``.
"""

import argparse
import json
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType

from pipeline.config.schema import WandbMode
from pipeline.run.directory import Run, load_run
from pipeline.run.journal import Row
from pipeline.run.lease import HEARTBEAT_SECONDS, hold
from pipeline.tracking.client import Opened, confirmed_by_server, open_run
from pipeline.tracking.refusal import RunRefused
from pipeline.tracking.state import keep_entity, mirror_lease, published, read_state, write_state

_PATIENCE = 150.0
"""Seconds to wait for another writer to W&B; longer than the lease of one that died on another host lasts."""

Note = Callable[[str], None]


@dataclass(frozen=True)
class Mirrored:
    """Result of one mirroring."""

    rows: int
    """Rows of the run, those of evaluate.command included."""
    had: int
    """Rows that W&B had before, or that an earlier offline run holds."""
    sent: int
    missing: int = 0
    """Rows that the server has not confirmed."""
    url: str = ""


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


def mirror(run: Run, feed: Feed, note: Note) -> Mirrored:
    """Send the rows that W&B lacks, now and for as long as ``feed`` goes on.

    Raises:
        LeaseHeld: another writer has been at it for minutes.
        RunRefused: as the run is set, W&B will never take it.
        wandb.errors.Error, and whatever else its client raises: W&B refuses or cannot be reached.
    """
    with hold(mirror_lease(run.paths), _PATIENCE) as lease:
        while True:
            opened = _opened(run, note)
            try:
                at = follow(run, opened, feed, lease.beat)
                break
            except TakenBack:
                opened.handle.finish(exit_code=0)
        opened.handle.finish(exit_code=feed.exit_code)
        rows, first = published(run), opened.first_step
        arrived = min(confirmed_by_server(opened), at)
        write_state(run.paths, replace(read_state(run.paths), confirmed=arrived))
        remove_files(run)
        missing = max(0, len(rows) - arrived)
        return Mirrored(len(rows), first, at - first, missing, opened.handle.url or "")


class TakenBack(Exception):
    """Rows that were sent have gone or changed since."""


def _opened(run: Run, note: Note) -> Opened:
    """Open the W&B run, a new one where W&B has what the run has not."""
    rows = _rows_to_send(run, note)
    remove_files(run)
    opened = open_run(run, WandbMode.ONLINE)
    state = read_state(run.paths)
    ours = min(len(rows), state.sent) if state.digest else len(rows)  # nothing noted: up to all
    if (there := opened.first_step) > ours:
        opened.handle.finish(exit_code=0)
        note(f"W&B has {there} rows, the run {ours}: a new W&B run has all")
        write_state(run.paths, read_state(run.paths).next_generation())
        opened = open_run(run, WandbMode.ONLINE)
    keep_entity(run, opened.handle.entity)
    return opened


def _rows_to_send(run: Run, note: Note) -> list[Row]:
    """Return the rows; where rows that were sent have gone or changed, they go to a new W&B run."""
    rows, state = published(run), read_state(run.paths)
    if not state.holds(rows):
        note("W&B has rows that were retracted or changed since: a new W&B run has all")
        write_state(run.paths, state.next_generation())
    return rows


def follow(run: Run, opened: Opened, feed: Feed, beat: Callable[[], None]) -> int:
    """Send what is missing, again whenever more has come. Returns the number of rows that W&B then has."""
    at, goes_on = opened.first_step, True
    while goes_on:
        at = send(run, opened, at)
        beat()
        goes_on = feed.goes_on(beat)
    return send(run, opened, at)


def send(run: Run, opened: Opened, at: int) -> int:
    """Log the rows from step ``at`` on. Returns the step after the last. Raises TakenBack."""
    rows, state = published(run), read_state(run.paths)
    if not state.holds(rows):
        raise TakenBack
    if len(rows) <= at:
        return at
    write_state(run.paths, state.with_sent(rows))
    for step, row in enumerate(rows[at:], at):
        opened.log(run, row, step)
    return len(rows)


def carry(run: Run, folder: Path, note: Note) -> Mirrored:
    """Write the rows that W&B lacks, and that no earlier call has written, as an offline run of W&B."""
    with hold(mirror_lease(run.paths), _PATIENCE):
        rows = _rows_to_send(run, note)
        state = read_state(run.paths)
        if state.sent > max(state.confirmed, state.carried):
            note("a writer was ended before it could say what W&B has: a new W&B run has all")
            state = state.next_generation()
            write_state(run.paths, state)
        first = max(state.confirmed, state.carried)
        if first < len(rows):
            folder.mkdir(parents=True, exist_ok=True)
            opened = open_run(run, WandbMode.OFFLINE, folder)
            send(run, opened, first)
            opened.handle.finish(exit_code=0)
            write_state(run.paths, replace(read_state(run.paths), carried=len(rows)))
        return Mirrored(len(rows), first, len(rows) - first)


def remove_files(run: Run) -> None:
    """Remove what the client has written while it was online: thousands would pile up."""
    for folder in run.paths.wandb.glob("run-*"):
        shutil.rmtree(folder, ignore_errors=True)


def closed_by_sigterm() -> int:
    """Return a descriptor that is readable from SIGTERM on: closing W&B in order keeps what was sent."""
    stop, told = os.pipe()

    def terminate(number: int, frame: FrameType | None) -> None:
        os.write(told, b"x")

    signal.signal(signal.SIGTERM, terminate)
    return stop


def main() -> None:
    """Run ``python -m pipeline.tracking.mirror RUN [--once | --offline DIR]``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--offline", type=Path)
    asked = parser.parse_args()

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
            done = mirror(run, feed, note)
        say(done=asdict(done))
    except RunRefused as error:
        say(refused=str(error), fault=error.fault)
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # everything is closed; the client's own exit waits for its service without a limit


if __name__ == "__main__":
    main()
