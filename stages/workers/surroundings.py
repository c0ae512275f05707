"""What a worker asks its surroundings: the queue, its filesystem, its package; and its own output."""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config.changeable import of_worker
from pipeline.config.issue import UserError
from pipeline.decide.staying import ASK_SECONDS, QUEUE_SECONDS
from pipeline.run.control import Control, SpoiltControl, read_control
from pipeline.run.directory import Run
from pipeline.run.durable import make_folder
from pipeline.run.owner import owner_of_job
from pipeline.workers.outside import Queue
from stages.workers.noticing import FolderEvents


class Asking:
    """Questions that may take long, asked in a thread: who waits for something else is not late for it."""

    def __init__(self, ask: Callable[[], Queue | None]) -> None:
        self._ask, self._asked = ask, float("-inf")
        self._thread: threading.Thread | None = None
        self._queue = Queue()
        self._lacking: frozenset[str] = frozenset()

    @property
    def ends(self) -> float | None:
        """Unix time of the worker's own end, by the last answer."""
        return self._queue.ends

    def newly_lacking_room(self) -> frozenset[str]:
        """Return the jobs that have come to wait for room since the last call, by the last
        answer."""
        now, before = self._queue.lacking_room, self._lacking
        self._lacking = now
        return now - before

    def ask_again(self, after: float = QUEUE_SECONDS) -> None:
        """Ask, unless the last question is younger than ``after`` seconds, or not answered yet."""
        now = time.monotonic()
        if now - self._asked < after or (self._thread is not None and self._thread.is_alive()):
            return
        self._asked = now
        self._thread = threading.Thread(target=self._fetch, daemon=True)
        self._thread.start()

    def _fetch(self) -> None:
        self._queue = self._ask() or self._queue


class Wakeup:
    """Signals, as something that can be waited for: SIGUSR1 says that something may have come, SIGTERM and
    SIGUSR2 that the process is to end."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self.warned = False

    def listen(self) -> None:
        """Handle the signals: a task handles some of them in its own way while it runs."""
        signal.signal(signal.SIGUSR1, self._wake)
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._warn)

    def wait(self, seconds: float, notices: FolderEvents | None = None) -> bool:
        """Wait for a signal, so many seconds at most. Returns whether one has come since the last call.

        Args:
            notices: what ends the wait too.
        """
        others = notices.descriptors if notices else ()
        readable = select.select([self._reader, *others], [], [], seconds)[0]
        if notices is not None and len(readable) > (self._reader in readable):
            notices.forget()
        if self._reader not in readable:
            return False
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 1 << 12)
        return True

    def _wake(self, number: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):  # full: a signal is noted already
            os.write(self._writer, b"!")

    def _warn(self, number: int, frame: object) -> None:
        self.warned = True
        self._wake(number, frame)


class Output:
    """Standard output and error of this process, sent to the log of one task after the other."""

    def __init__(self) -> None:
        self._own: tuple[int, int] | None = None

    def turn_to(self, log: Path, run_dir: Path) -> None:
        """Append to a log. On a disk that is full output goes on where it went."""
        flush_output()
        if self._own is None:
            self._own = os.dup(1), os.dup(2)
        with contextlib.suppress(OSError):
            make_folder(log.parent, run_dir)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)

    def turn_back(self) -> None:
        """Write where the process wrote at first."""
        flush_output()
        if self._own is not None:
            os.dup2(self._own[0], 1)
            os.dup2(self._own[1], 2)


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def control_of(run: Run) -> Control | None:
    """Return what people and passes have said of a run; None where that is spoilt: a pass will say so."""
    try:
        return read_control(run.paths)
    except SpoiltControl:
        return None


def is_called_off(control: Control) -> bool:
    """Whether people cancelled the run, or took it over from the submitter of this process: nothing follows
    then, and Slurm soon kills what has not ended."""
    return control.cancelled or control.is_taken_over_from(owner_of_job(os.environ))


@dataclass
class OwnSettings:
    """The settings that this process began with."""

    run: Run
    job_kind: str
    _invocation: int = -1
    _looked: float = 0.0

    def have_changed(self, invocation: int) -> bool:
        """Whether a worker that starts now would be another. People change settings as they resume a run, so
        that is looked up at once in each invocation, and at most every half minute beside: a command may be
        killed between the change and its invocation."""
        now = time.monotonic()
        if invocation == self._invocation and now - self._looked < ASK_SECONDS:
            return False
        try:
            newest = self.run.with_newest_settings()
        except (UserError, OSError):  # a pass will say so
            return False
        self._invocation, self._looked = invocation, now
        mine, others = (of_worker(run.config, self.job_kind) for run in (self.run, newest))
        return mine != others


@dataclass
class Package:
    """The files that this process was made of: modules of ours as imported, and the run's configuration."""

    run: Run
    seen: dict[str, float] = field(default_factory=dict)
    _looked: float = 0.0

    def has_changed(self) -> bool:
        """Whether one of them differs from when it was first looked at; at most every half minute."""
        if time.monotonic() - self._looked < ASK_SECONDS:
            return False
        self._looked = time.monotonic()
        now = {name: _modified(name) for name in self._files()}
        before, self.seen = self.seen, {**now, **self.seen}
        return any(now.get(name) != time for name, time in before.items())

    def _files(self) -> set[str]:
        ours = [
            m
            for name, m in list(sys.modules.items())
            if name.split(".")[0] in ("pipeline", "slurm", "stages")
        ]
        files = {file for module in ours if (file := getattr(module, "__file__", None))}
        return files | {str(self.run.paths.run_json), str(self.run.paths.config_yaml)}


def _modified(path: str) -> float:
    try:
        return os.stat(path).st_mtime  # noqa: PTH116  a name is at hand, for each of some hundred files
    except OSError:
        return 0.0
