"""Background reading: a thread for the run directory, one for Slurm, so that neither blocks the keys."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.config.scheduler import SlurmConfig
from pipeline.executors.slurm.queue import Queue, look_at_queue
from pipeline.run.directory import Run
from pipeline.watch.logends import read_log_end
from pipeline.watch.look import Look, ShardState, SnapshotReader
from pipeline.watch.screen import LogEnd

_DISK_SECONDS = 2.0
"""Seconds between looks at the run directory, or the interval for Slurm where that is shorter."""
_REST_FACTOR = 4.0
"""Rest after a look, in multiples of its duration: a look at thousands of shards takes a while."""
_LONGEST_REST = 60.0
SILENT_SECONDS = 10.0
"""Seconds after which an unfinished look is reported: the file system does not answer."""


@dataclass(frozen=True)
class Wish:
    """Request for something to be read besides the run."""

    log_of: tuple[int, str] | None = None
    """Key of the lane whose log is wanted: :attr:`pipeline.watch.look.Lane.key`."""


@dataclass(frozen=True)
class Seen:
    """The newest of everything that was read."""

    look: Look | None = None
    log: LogEnd | None = None
    log_of: tuple[int, str] | None = None
    """Key of the lane whose log it is."""
    trouble: str | None = None
    """Reason why the last try to read failed."""
    is_settled: bool = False
    """Whether two looks in a row, with Slurm asked in between, say that the run has ended."""


@dataclass
class Answer:
    """Slurm's newest answer."""

    queue: Queue | None = None
    answered: float | None = None
    count: int = 0

    def take(self, queue: Queue) -> None:
        """Accept an answer; where there is none, what was shown last stays."""
        if queue.unanswered is None:
            self.queue, self.answered = queue, time.time()
        else:
            elements = self.queue.elements if self.queue else ()
            self.queue = Queue(elements, queue.unanswered)
        self.count += 1


class Reading:
    """Two threads that read; :attr:`seen` may be read at any time."""

    def __init__(self, run: Run, interval: float, ask: Callable[[Run], Queue] = look_at_queue) -> None:
        self.run, self.interval = run, interval
        self.seen, self.wish = Seen(), Wish()
        self.error: BaseException | None = None
        self.is_paused = False
        self.began: float | None = None
        """Monotonic time at which the present look began; None between looks."""
        self.arrived = threading.Event()
        """Event that is set whenever there is something new in :attr:`seen`."""
        self._ask = ask
        self._answer = Answer()
        self._is_on_slurm = isinstance(run.config.scheduler, SlurmConfig)
        self._stop, self._hurry = threading.Event(), threading.Event()
        self._looker = SnapshotReader(run)
        self._looks = 0
        self._ended_at: tuple[str, int] | None = None
        """State that showed the end, and how many looks or answers there were when it showed first."""

    def start(self) -> None:
        """Start the threads, as daemons: a file system that hangs must not keep the program from ending."""
        targets = [self._read_on, *([self._ask_on] if self._is_on_slurm else [])]
        for target in targets:
            threading.Thread(target=self._guarded, args=(target,), daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        self._hurry.set()

    def want(self, wish: Wish) -> None:
        """Read this now, and from now on."""
        if wish != self.wish:
            self.wish = wish
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
                self._answer.take(self._ask(self.run))
            self._stop.wait(self.interval)

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
        """Look once; what the file system refuses for now is reported, and tried again."""
        try:
            look = self._looker.look(self._answer.queue, self._answer.answered)
        except OSError as error:
            return replace(self.seen, trouble=f"cannot read the run now: {error}")
        self.seen = replace(self.seen, look=look, trouble=None, is_settled=self._settle(look))
        return self._with_log()

    def _with_log(self) -> Seen:
        """Return what was seen last, with the log that is wanted now."""
        key, look = self.wish.log_of, self.seen.look
        if key is None or look is None:
            return replace(self.seen, log=None, log_of=None)
        lane = next((lane for lane in look.lanes if lane.key == key), None)
        has_failed = lane is not None and bool({ShardState.FAILED, ShardState.AGAIN} & set(lane.shards))
        try:
            log = read_log_end(self.run.paths, *key, look.events, has_failed)
        except OSError as error:
            return replace(self.seen, trouble=f"cannot read the log now: {error}")
        return replace(self.seen, log=log, log_of=key)

    def _settle(self, look: Look) -> bool:
        """Whether the run has ended for good.

        Between two drivers nobody is at work for a moment, and the last row follows the last commit.
        """
        self._looks += 1
        if not look.has_ended or _is_winding_up(look):
            self._ended_at = None
            return False
        if look.state == "complete" and _has_last_row(look):
            return True
        count = self._answer.count if self._is_on_slurm else self._looks
        if self._ended_at is None or self._ended_at[0] != look.state:
            self._ended_at = look.state, count
        return count > self._ended_at[1]


def _is_winding_up(look: Look) -> bool:
    """Whether somebody may still write about a run that has ended."""
    slurm = look.slurm
    has_jobs = slurm is not None and slurm.jobs_running + slurm.jobs_waiting > 0
    return look.driver is not None or (look.state == "complete" and has_jobs and not _has_last_row(look))


def _has_last_row(look: Look) -> bool:
    return bool(look.rows) and look.rows[-1].get("iteration") == look.iterations
