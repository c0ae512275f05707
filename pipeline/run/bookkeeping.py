"""Passes that workers ask for, in processes of their own: one at a time, for a tenth of a core at most.

Whoever commits or leaves, or waits and knows of no pass for long, writes a wish, a file in the run's
``slurm/passes/``. A pass takes the wish away before it looks, so that one written while it is at work is for
the next. Where another worker's pass is at work, or was a moment ago, a wish is left for whoever looks next:
a worker that commits, waits or leaves.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.run.durable import replace_durably
from pipeline.run.lease import LeaseHeld, hold, holder_of
from pipeline.run.paths import RunPaths
from slurm.requests import find_requests, request_pass
from slurm.sealing import sealed, unsealed
from slurm.sharedfiles import is_there, make_folder, read_newest

_REST = 9.0
"""Times as long as the last pass took, for which there is no other: passes take a tenth of a core."""
_LEAVING_SECONDS = 120.0
"""Seconds that a worker which leaves waits for a pass that has seen it leave."""
_STARTING_SECONDS = 10.0
"""Seconds that a process may take until it makes its pass, before another is started. Else all who wait would
start one, of which one is needed."""
_STARTED = "started"
_POLL_SECONDS = 0.1
_ASK_AGAIN_SECONDS = 0.5
"""Seconds after which the batch script is asked once more: it makes a pass, and needs a while to start it."""


@dataclass(frozen=True)
class LastPass:
    """The last pass that a worker started. Unix times."""

    began: float = 0.0
    ended: float = 0.0
    number: int = 0
    """Number of passes up to this one that have not failed."""

    def allows_another(self, now: float) -> bool:
        """Whether it has been over for long enough. Pure. A time that is still to come, of a machine whose
        clock is ahead, holds nobody up."""
        return not 0 <= now - self.ended < _REST * (self.ended - self.began)


def ask_for_pass(paths: RunPaths) -> None:
    """Write down that something has happened that a pass should see. A wish that is there already does: it is
    taken away before anything is looked at."""
    if is_wanted(paths):
        return
    make_folder(_folder(paths))
    replace_durably(_wish(paths), f"{time.time()}\n")


def is_wanted(paths: RunPaths) -> bool:
    """Whether something has happened that no pass has seen."""
    return is_there(_wish(paths))


def is_due(paths: RunPaths, now: float) -> bool:
    """Whether to start a pass now: it is wanted, none is at work or about to be, and the last is over for a
    while."""
    if not is_wanted(paths) or holder_of(_folder(paths)) is not None:
        return False
    last = read_last(paths)
    return last.allows_another(now) and not is_starting(last, _newest_start(paths), now)


def is_starting(last: LastPass, started: float, now: float) -> bool:
    """Whether somebody has just started a process for a pass, which has not begun yet. Pure.

    Args:
        started: unix time of the newest start.
    """
    return last.began < started and 0 <= now - started < _STARTING_SECONDS


def _newest_start(paths: RunPaths) -> float:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return float(read_newest(_folder(paths) / _STARTED))
    return 0.0


def read_last(paths: RunPaths) -> LastPass:
    try:
        return LastPass(**unsealed(read_newest(_last(paths))))
    except (FileNotFoundError, ValueError, TypeError):
        return LastPass()


def take_turn(paths: RunPaths, make_pass: Callable[[], object]) -> bool:
    """Make a pass that was asked for. Returns whether it was made here: False if another is at work, to which
    the wish is left, or has taken it away meanwhile.

    A pass that fails leaves the wish for another, and raises what it raised.
    """
    try:
        with hold(_folder(paths)):
            if not is_wanted(paths):
                return False
            with _on_record(paths):
                _wish(paths).unlink(missing_ok=True)
                make_pass()
    except LeaseHeld:
        return False
    return True


@contextlib.contextmanager
def _on_record(paths: RunPaths) -> Iterator[None]:
    began, number = time.time(), read_last(paths).number
    try:
        yield
        number += 1
    except BaseException:
        ask_for_pass(paths)
        raise
    finally:
        replace_durably(_last(paths), sealed(asdict(LastPass(began, time.time(), number))))


@dataclass
class Bookkeeper:
    """The passes that one worker starts. Of several ranks the first has one."""

    paths: RunPaths
    child: subprocess.Popen[bytes] | None = None

    def ask(self) -> None:
        """After a commit: ask for a pass, and start one if it is time."""
        ask_for_pass(self.paths)
        self.tend()

    def tend(self) -> None:
        """While waiting, now and then: start a pass that somebody has asked for."""
        is_idle = self.child is None or self.child.poll() is not None
        if is_idle and is_due(self.paths, time.time()):
            self._start()

    def leave(self, seconds: float = _LEAVING_SECONDS) -> None:
        """Before the end, when the beat says that the worker leaves: wait until a pass has seen that.

        A wish that is there later may be another worker's: so passes are counted. One that is at work now may
        have looked before.
        """
        until = time.monotonic() + seconds
        is_at_work = holder_of(_folder(self.paths)) is not None
        enough = read_last(self.paths).number + (2 if is_at_work else 1)
        ask_for_pass(self.paths)
        while read_last(self.paths).number < enough and time.monotonic() < until:
            self._wait(until)
            if holder_of(_folder(self.paths)) is None and read_last(self.paths).number < enough:
                self._start()
            time.sleep(_POLL_SECONDS if self.child else _ASK_AGAIN_SECONDS)
        self._wait(until)

    def _start(self) -> None:
        with contextlib.suppress(OSError):  # then others may start one too
            replace_durably(_folder(self.paths) / _STARTED, f"{time.time()}\n")
        self.child = start_pass(self.paths)

    def _wait(self, until: float) -> None:
        if self.child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(max(0.0, until - time.monotonic()))


def start_pass(paths: RunPaths) -> subprocess.Popen[bytes] | None:
    """Start a process that makes a pass: without GPUs, and with a log that all of them share. None: the batch
    script was asked for one, outside of the container."""
    if (fifo := find_requests()) is not None:
        if said := request_pass(fifo):
            print(f"no pass was asked for: {said}", flush=True)
        return None
    log = passes_log(paths)
    make_folder(log.parent)
    command = [sys.executable, *(["-P"] if sys.flags.safe_path else [])]
    command += ["-m", "pipeline", "advance", str(paths.root), "--asked"]
    with log.open("ab") as output:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )


def passes_log(paths: RunPaths) -> Path:
    """Return the log that all passes share which workers have asked for."""
    return paths.log_root / "passes" / "passes.log"


def _folder(paths: RunPaths) -> Path:
    return paths.slurm / "passes"


def _wish(paths: RunPaths) -> Path:
    return _folder(paths) / "wanted"


def _last(paths: RunPaths) -> Path:
    return _folder(paths) / "last"
