"""The driver's end of the mirrors: processes that are notified of new rows and never waited for.

metrics.jsonl is the truth. A destination that is absent, slow, refused or broken is noted once, also in the
journal, and never stops training; what did not arrive is sent by the next driver, or by ``slurm-ppo sync``.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from subprocess import PIPE, Popen
from typing import IO, Any

from pipeline.config.schema import WandbMode
from pipeline.process import ended_within, signal_session
from pipeline.run.directory import Run
from pipeline.run.journal import Row
from pipeline.run.troubles import Trouble, note_recovery, note_trouble
from pipeline.tracking.destination import Destination, switched_on
from pipeline.tracking.state import Sent, published, read_state, sync_command, wandb_mode
from slurm.sharedfiles import from_json

_CLOSE_SECONDS = 60.0
"""Seconds that a driver that is about to end waits for the last rows to arrive."""
_KILL_SECONDS = 10.0

Note = Callable[[str], None]


def last_words(text: str) -> str:
    """Return a process's last output as one line; of a traceback, the error, however many lines that has."""
    lines = [line for line in text.splitlines() if line.strip() and "For further information" not in line]
    frames = [index for index, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] :] if frames else []
    begin = next((index for index, line in enumerate(after) if not line.startswith(" ")), len(after))
    name, colon, rest = (" ".join(after[begin:] or lines[-1:]) or "no word").partition(": ")
    return " ".join((name.rpartition(".")[2] + colon + rest).split())[:240]


@dataclass
class MirrorProcess:
    """One process ``python -m pipeline.tracking.mirror``."""

    process: "Popen[bytes]"
    output: IO[bytes]
    errors: IO[bytes]
    _read: int = 0

    @staticmethod
    def start(run: Run, to: Destination, *options: str) -> "MirrorProcess":
        """Start it in a session of its own: Ctrl-C is for the driver, which then closes it in order."""
        output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        words = [sys.executable, "-P", "-m", "pipeline.tracking.mirror", str(run.paths.root), "--to", to]
        words += options
        process = Popen(words, stdin=PIPE, stdout=output, stderr=errors, start_new_session=True)
        assert process.stdin
        os.set_blocking(process.stdin.fileno(), False)
        return MirrorProcess(process, output, errors)

    def tell(self, line: str) -> None:
        """Write a line without blocking; one lost to a dead process or a full pipe does no harm."""
        assert self.process.stdin
        with suppress(BrokenPipeError, BlockingIOError):
            os.write(self.process.stdin.fileno(), f"{line}\n".encode())

    def said(self) -> list[dict[str, Any]]:
        """Return its messages since the last call."""
        self.output.seek(self._read)
        lines = self.output.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._read += sum(map(len, whole))
        return [from_json(line) for line in whole]

    @property
    def has_failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    def last_line(self) -> str:
        """Return the last line of its standard error, for a person."""
        self.errors.seek(0)
        return last_words(self.errors.read().decode(errors="replace"))

    def wait(self, seconds: float) -> bool:
        """Close its input and wait for its end; false where it had to be killed."""
        assert self.process.stdin
        self.process.stdin.close()
        if ended_within(self.process, seconds):
            return True
        self.kill()
        return False

    def kill(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal_session(self.process.pid, number)
            if ended_within(self.process, _KILL_SECONDS):
                return


@dataclass
class MirrorTracker:
    """A mirror process for as long as the driver lives, or until its destination fails."""

    run: Run
    to: Destination
    note: Note
    mirror: MirrorProcess | None = field(init=False)

    def __post_init__(self) -> None:
        self.mirror = MirrorProcess.start(self.run, self.to)

    def update(self) -> None:
        if self.mirror:
            self.mirror.tell("row")
            self._listen()

    def tell_end(self, exit_code: int) -> None:
        """Have the mirror end once it has sent every row."""
        if self.mirror:
            self.mirror.tell(f"end {exit_code}")

    def close(self, until: float) -> None:
        """Wait for its end, up to a time (monotonic)."""
        if not (closing := self.mirror):
            return
        if closing.wait(until - time.monotonic()):
            self._listen()
            return
        self._say_notes(closing)
        self._give_up(f"{self.to.label} did not take every row within {_CLOSE_SECONDS:g} s")

    @property
    def _later(self) -> str:
        return f"the rest follows with the next driver, or by: {sync_command(self.run, self.to)}"

    def _listen(self) -> None:
        """Pass on its notes; if it has failed, go on without it."""
        assert self.mirror
        self._say_notes(self.mirror)
        if self.mirror.has_failed:
            self._give_up(f"{self.to.label} cannot be used now ({self.mirror.last_line()})")
            self.mirror = None

    def _give_up(self, why: str) -> None:
        self.note(f"{why}; {self._later}")
        note_trouble(self.run.paths, Trouble(self.to), why)

    def _say_notes(self, mirror: MirrorProcess) -> None:
        for said in mirror.said():
            if "note" in said:
                self.note(said["note"])
            elif missing := said.get("done", {}).get("missing"):
                self.note(
                    f"{self.to.label} has not confirmed {missing} rows yet; the next driver looks again"
                )
            elif "done" in said:
                note_recovery(self.run.paths, Trouble(self.to))


@dataclass(frozen=True)
class Trackers:
    """Receivers of the news that metrics.jsonl has grown, one for each destination."""

    each: Sequence[MirrorTracker] = ()

    def update(self) -> None:
        for tracker in self.each:
            tracker.update()

    def close(self, exit_code: int) -> None:
        """Have all send what is left, at the same time, and wait for them."""
        until = time.monotonic() + _CLOSE_SECONDS
        for tracker in self.each:
            tracker.tell_end(exit_code)
        for tracker in self.each:
            tracker.close(until)


def open_trackers(run: Run, destinations: Sequence[Destination], note: Note) -> Trackers:
    """Open trackers for destinations. ``note`` takes what goes wrong."""
    return Trackers([MirrorTracker(run, to, note) for to in destinations])


def enabled(run: Run) -> list[Destination]:
    """Return the destinations that the configuration and the environment ask for."""
    tracking = run.config.tracking
    is_online = wandb_mode(tracking.wandb.mode, os.environ) is WandbMode.ONLINE
    return [Destination.WANDB] * is_online + switched_on(tracking)


def behind(run: Run) -> list[Destination]:
    """Return the destinations that lack rows that this driver should send."""
    asked = enabled(run)
    rows = published(run) if asked else []
    return [to for to in asked if lacks(read_state(run.paths, to), rows)]


def lacks(state: Sent, rows: Sequence[Row]) -> bool:
    """Whether a destination has not confirmed all rows as they are. Pure."""
    return state.confirmed < len(rows) or not state.holds(rows)
