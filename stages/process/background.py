"""Work that a thread of this process does beside its tasks, one job at a time: the writing of a trainer's
state while the next update computes.

The thread is a daemon: one that a hung disk holds keeps no process from ending.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from stages.logs import log


@dataclass(frozen=True)
class Label:
    """What a job is about."""

    root: Path
    """Directory of the run."""
    iteration: int
    task: str
    """Key of the task whose attempt left the job."""
    attempt: str
    num_bytes: float
    """Bytes that the job holds in memory until it ends."""
    patience: float
    """Seconds for which a process that leaves waits for the job."""


@dataclass
class _Job:
    label: Label
    has_failed: bool = False
    """Whether it has failed, and nothing like it could be done since."""
    is_lost: bool = False
    """Whether it has failed."""
    thread: threading.Thread | None = None

    def run(self, work: Callable[[], None]) -> None:
        begun = time.monotonic()
        try:
            work()
        except Exception:  # whatever it is: what follows can make the state again from the policy
            self.has_failed = self.is_lost = True
            log.exception(
                f"iteration {self.label.iteration}: the trainer's state was not saved; the next one is "
                "written before its attempt ends:"
            )
        else:
            _seconds[WRITE] = time.monotonic() - begun


WRITE, HELD_UP = "seconds/state/write", "seconds/state/held_up"
_seconds: dict[str, float] = {}
"""Numbers for the next update's record."""
_newest: _Job | None = None
"""The running job, or the last one."""
_at_end: Callable[[], None] | None = None


def begin(label: Label, work: Callable[[], None]) -> None:
    """Have a thread do ``work``, once the job before has ended. What it raises is logged, and noted. Raises
    TimeoutError as :func:`finish`."""
    global _newest
    finish()
    _newest = job = _Job(label)

    def run() -> None:
        job.run(work)
        job.thread = None
        if _at_end is not None:
            _at_end()

    job.thread = thread = threading.Thread(target=run, name="background", daemon=True)
    thread.start()


def note_held_up(seconds: float) -> None:
    """Note for how long the process could not begin another task because of a state."""
    _seconds[HELD_UP] = seconds


def take_seconds() -> dict[str, float]:
    """Return what states took since the last call, by the names of metrics."""
    global _seconds
    taken, _seconds = _seconds, {}
    return taken


def hear_of_end(act: Callable[[], None]) -> None:
    """Have a function called in the thread whenever a job has ended."""
    global _at_end
    _at_end = act


def wait(seconds: float | None = None) -> bool:
    """Wait until the running job has ended, but no longer than ``seconds``. Returns whether none is left."""
    thread = _newest.thread if _newest else None
    if thread is not None:
        thread.join(seconds)
    return at_work() is None


def finish() -> None:
    """Wait for the running job, as long as its label says. Raises TimeoutError."""
    label = at_work()
    if label is not None and not wait(label.patience):
        raise TimeoutError(f"{_state(label)} was not written within {label.patience:.0f} s")


def _state(label: Label) -> str:
    return f"the trainer's state of iteration {label.iteration}"


def at_work() -> Label | None:
    """Return what is done now; None: nothing."""
    job = _newest
    return job.label if job is not None and job.thread is not None and job.thread.is_alive() else None


def has_failed() -> bool:
    """Whether the last job has failed."""
    return _newest is not None and at_work() is None and _newest.has_failed


def forget_failure() -> None:
    """Take the last job for no failure any more: what it was to do could be done since."""
    if _newest is not None:
        _newest.has_failed = False


def newest(root: Path) -> int:
    """Return the iteration of the last job of a run, unless it has failed; 0 where there was none."""
    job = _newest
    return 0 if job is None or job.label.root != root or job.is_lost else job.label.iteration


def leave() -> None:
    """Wait for the running job before the process leaves, as long as it says."""
    label = at_work()
    if label is None:
        return
    log.info(f"{_state(label)} is being written: the process waits for it, for up to {label.patience:.0f} s")
    try:
        finish()
    except TimeoutError as error:
        log.error(f"{error}: the process leaves, and the next update learns it again")


@contextlib.contextmanager
def before_termination() -> Iterator[None]:
    """Have SIGTERM, in this block, end the process only when the running job has ended (:func:`leave`)."""
    if threading.current_thread() is not threading.main_thread() or at_work() is None:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
