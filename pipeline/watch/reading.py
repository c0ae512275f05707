"""Background reading: a thread for the run directory, one for Slurm, so that neither blocks the keys."""

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.executors.slurm.queue import Queue, look_at_queue
from pipeline.run.directory import Run
from pipeline.run.packed import BadArchive
from pipeline.run.tasks import task_of
from pipeline.status.lanes import ShardState
from pipeline.status.log_files import end_of
from pipeline.status.logs import log_to_show
from pipeline.status.snapshot import StatusReader
from pipeline.status.state import Status
from pipeline.watch.screen import LogEnd
from slurm.sharedfiles import PASSING

_DISK_SECONDS = 2.0
"""Seconds between looks at the run directory, or the interval for Slurm where that is shorter."""
_REST_FACTOR = 4.0
"""Rest after a look, in multiples of its duration: a look at thousands of shards takes a while."""
_LONGEST_REST = 60.0
_LOG_LINES = 200
_TRIED_AGAIN = {ShardState.FAILED, ShardState.AGAIN}


@dataclass(frozen=True)
class Seen:
    """The newest of everything that was read."""

    look: Status | None = None
    log: LogEnd | None = None
    trouble: str | None = None
    """Reason why the last try to read failed."""
    is_settled: bool = False
    """Whether two looks in a row, with Slurm asked in between, say that the run has ended."""


class Reading:
    """Two threads that read; :attr:`seen` may be read at any time."""

    def __init__(self, run: Run, interval: float, ask: Callable[[Run], Queue] | None = None) -> None:
        self.run, self.interval = run, interval
        self.seen = Seen()
        self.wanted: tuple[int, str] | None = None
        """Key of the lane whose log is wanted."""
        self.error: BaseException | None = None
        self.is_paused = False
        self.began: float | None = None
        """Monotonic time at which the present look began; None between looks."""
        self.arrived = threading.Event()
        """Event that is set whenever there is something new in :attr:`seen`."""
        who = functools.cache(run.who_acts)  # the cluster that is asked from here stays the same
        self._ask = ask or (lambda run: look_at_queue(run, max_age=interval, who=who))
        self._queue: Queue | None = None
        self._answered: float | None = None
        self._stop, self._hurry = threading.Event(), threading.Event()
        self._reader = StatusReader(run)
        self._count = 0
        """Number of answers of Slurm; of looks, where there is no Slurm."""
        self._ended_at: tuple[str, int] | None = None
        """State that showed the end, and the count when it showed first."""

    def start(self) -> None:
        """Start the threads, as daemons: a file system that hangs must not keep the program from ending."""
        for target in [self._read_on, *([self._ask_on] if self.run.config.slurm else [])]:
            threading.Thread(target=self._guarded, args=(target,), daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        self._hurry.set()

    def want_log(self, lane: tuple[int, str] | None) -> None:
        """Read the log of this lane now, and from now on."""
        if lane != self.wanted:
            self.wanted = lane
            self._hurry.set()

    def check(self) -> None:
        """Raise in the caller's thread the error that ended one of ours."""
        if self.error:
            raise self.error

    def _guarded(self, target: Callable[[], None]) -> None:
        """Run a thread's target; an error that nobody expected ends the view, not just the thread."""
        try:
            target()
        except BaseException as error:
            self.error = error
            self.arrived.set()

    def _ask_on(self) -> None:
        while not self._stop.is_set():
            if not self.is_paused:
                self._take(self._ask(self.run))
            self._stop.wait(self.interval)

    def _take(self, queue: Queue) -> None:
        """Keep what Slurm has answered; if it has not, what was shown last stays."""
        if queue.unanswered is not None:
            self._queue = replace(self._queue or Queue(), unanswered=queue.unanswered, asked=None)
            self._count += 1
            return
        is_new = self._queue is None or queue.asked is None or queue.asked != self._queue.asked
        self._queue, self._answered = queue, queue.asked or time.time()
        self._count += is_new  # others' answers may be shown more than once

    def _read_on(self) -> None:
        while not self._stop.is_set():
            started = self.began = time.monotonic()
            if not self.is_paused:
                self.seen = self._read()
                self.arrived.set()
            self.began, ended = None, time.monotonic()
            rest = max(min(_DISK_SECONDS, self.interval), _REST_FACTOR * (ended - started))
            self._rest_until(ended + min(rest, _LONGEST_REST))

    def _rest_until(self, end: float) -> None:
        """Rest, but read a log at once when somebody asks for it."""
        while (left := end - time.monotonic()) > 0 and not self._stop.is_set():
            if self._hurry.wait(left):
                self._hurry.clear()
                self.seen = self._with_log()
                self.arrived.set()

    def _read(self) -> Seen:
        """Look once; what the file system refuses is reported, and tried again, if it has ever shown the run
        or may pass.

        Raises:
            OSError: the run cannot be read until a person mends it.
        """
        try:
            look = self._reader.read(self._queue, self._answered)
        except OSError as error:
            if self.seen.look is None and error.errno not in PASSING:
                raise
            return replace(self.seen, trouble=f"cannot read the run now: {error}")
        self.seen = replace(self.seen, look=look, trouble=None, is_settled=self._settle(look))
        return self._with_log()

    def _with_log(self) -> Seen:
        """Return what was seen last, with the log that is wanted now."""
        key, look = self.wanted, self.seen.look
        try:
            log = self._log_end(key, look) if key and look else None
        except (OSError, BadArchive) as error:
            return replace(self.seen, trouble=f"cannot read the log now: {error}")
        return replace(self.seen, log=log)

    def _log_end(self, key: tuple[int, str], look: Status) -> LogEnd:
        paths, (iteration, job_kind) = self.run.paths, key
        has_failed = any(lane.key == key and _TRIED_AGAIN & set(lane.shards) for lane in look.lanes)
        log = log_to_show(paths, iteration, job_kind, look.events, has_failed)
        if log is None:
            folder = paths.logs(task_of(iteration, job_kind))
            return LogEnd(key, f"{job_kind} of iteration {iteration} has no log yet", str(folder), ())
        return LogEnd(key, log.name, str(log.path), tuple(end_of(paths, log, _LOG_LINES)) or ("(empty)",))

    def _settle(self, look: Status) -> bool:
        """Whether the run has ended for good: between two drivers nobody is at work for a moment."""
        is_local = look.slurm is None
        if is_local:
            self._count += 1
        if not look.has_ended or (is_local and look.driver):
            self._ended_at = None
            return False
        if look.state == "complete":
            return True
        if self._ended_at is None or self._ended_at[0] != look.state:
            self._ended_at = look.state, self._count
        return self._count > self._ended_at[1]
