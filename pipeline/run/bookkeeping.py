"""Passes that workers ask for, in a process of their own: one at a time, for a tenth of a core at most.

Whoever commits or leaves, or waits and knows of no pass for long, writes a wish, a file in the run's
``slurm/passes/``. A pass takes the wish away before it looks, so that one written while it is at work is for
the next. The process that makes passes is a worker's child. To start it costs more than a pass does, so it
stays for the wishes of all workers of the run, until that worker leaves or nobody wishes for anything; it
holds a lease meanwhile, and nobody starts another.
"""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.run.durable import replace_durably
from pipeline.run.lease import LeaseHeld, hold, holder_of
from pipeline.run.paths import RunPaths
from slurm.requests import find_requests, request_pass
from slurm.sealing import sealed, unsealed
from slurm.sharedfiles import is_there, make_folder, names_in, read_newest

_REST = 9.0
"""Times what a pass took of a processor, for which there is no other: passes take a tenth of a core."""
_LONGEST_PAUSE = 5.0
"""Most seconds without a pass after one that took long, but of a processor."""
_FAILED_PAUSES = (0.0, 5.0, 10.0, 20.0, 40.0, 60.0)
"""Least seconds without a pass after none, one, two or more that have failed one after the other."""
_IDLE_SECONDS = 60.0
"""Seconds without a wish after which the process that makes passes ends."""
_LEAVING_SECONDS = 120.0
"""Seconds that a worker which leaves waits for a pass that has seen it leave."""
_TAKEN_UP_SECONDS = 10.0
"""Seconds in which who waits looks for a wish, even on a network filesystem, twice."""
_STARTING_SECONDS = 10.0
"""Seconds that a process may take until it makes its pass, before another is started. Else all who wait would
start one, of which one is needed."""
_STARTED = "started"
_POLL_SECONDS = 0.1
_LOOK_SECONDS = 0.25
"""Seconds between two looks for a wish."""
_LONGEST_LATER = 120.0
"""Most seconds that a wish may be for later: one that is further ahead is of a clock that is."""
_NOW = "now"
"""Beginning of a wish that does not wait for the rest after a pass: of a worker that leaves."""
_ASK_AGAIN_SECONDS = 0.5
"""Seconds after which the batch script is asked once more: it makes a pass, and needs a while to start it."""


@dataclass(frozen=True)
class LastPass:
    """The newest pass that a worker has asked for. Unix times."""

    began: float = 0.0
    ended: float = 0.0
    """End of the newest that is over."""
    number: int = 0
    """Number of passes up to this one that have not failed."""
    rest: float = 0.0
    """Seconds after its end in which no other begins."""
    failures: int = 0
    """Number of the newest passes that have failed, one after the other."""

    @property
    def is_at_work(self) -> bool:
        """Whether it has not ended; also of one that was killed."""
        return self.began > self.ended

    @property
    def newest(self) -> float:
        """When a pass last looked, or began to. One that was killed at work counts for as long as any."""
        return max(self.began, self.ended)

    def allows_another(self, now: float) -> bool:
        """Whether it has been over for long enough. Pure. A time that is still to come, of a machine whose
        clock is ahead, holds nobody up."""
        return not 0 <= now - self.ended < self.rest


def ask_for_pass(paths: RunPaths, at_once: bool = False) -> bool:
    """Write down that something has happened that a pass should see. A wish that is there already does: it is
    taken away before anything is looked at.

    Args:
        at_once: without the rest after the last one.

    Returns:
        Whether it was not there already.
    """
    if is_there(_wish(paths)) and (not at_once or _is_urgent(paths)):
        return False
    make_folder(_folder(paths), paths.root)
    replace_durably(_wish(paths), f"{_NOW} {time.time()}\n" if at_once else f"{time.time()}\n")
    return True


def ask_for_pass_later(paths: RunPaths, seconds: float) -> None:
    """Write down that there is to be a pass in some seconds, if none was made until then. Of two such wishes
    the sooner counts."""
    now = time.time()
    if now < (_later_at(paths) or 0.0) <= now + seconds:
        return
    make_folder(_folder(paths), paths.root)
    replace_durably(_later(paths), f"{now + seconds}\n")


def is_wanted(paths: RunPaths) -> bool:
    """Whether something has happened that no pass has seen, or a pass is due that was wished for later."""
    names = names_in(_folder(paths))
    return _wish(paths).name in names or (_later(paths).name in names and _is_time(paths, time.time()))


def _is_time(paths: RunPaths, now: float) -> bool:
    at = _later_at(paths)
    return at is not None and not 0 < at - now <= _LONGEST_LATER


def _later_at(paths: RunPaths) -> float | None:
    """Return when there is to be a pass (unix time); None where that is not known."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return float(read_newest(_later(paths)))
    return None


def _is_urgent(paths: RunPaths) -> bool:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return read_newest(_wish(paths)).startswith(_NOW.encode())
    return False


def is_due(paths: RunPaths, now: float) -> bool:
    """Whether to start a process for a pass now: one is wanted, no process is there for it or about to be,
    and the last pass is over for a while."""
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
    """Read what is known of the newest pass. Where its file cannot be read, that is nothing: it says when the
    next is due, which is no reason that there be none."""
    try:
        return LastPass(**unsealed(read_newest(_last(paths))))
    except (OSError, ValueError, TypeError):
        return LastPass()


def take_turns(paths: RunPaths, make_pass: Callable[[], object], orders: int) -> None:
    """Make the passes that are asked for, until ``orders`` says that it is time to end, or nobody has asked
    for long. Where another process does so nothing is done.

    A pass that fails leaves the wish for another, and raises what it raised. The next comes later each time,
    whoever wishes for it.

    Args:
        orders: file descriptor; whatever there is to read, or its end, says so. Of what is wanted then one
            more pass is made.

    Raises:
        LeaseLost: another process took over.
    """
    make_folder(_folder(paths), paths.root)
    with contextlib.suppress(LeaseHeld), hold(_folder(paths)) as lease:
        idle_since, is_last = time.monotonic(), False
        while time.monotonic() - idle_since < _IDLE_SECONDS:
            lease.beat()
            if is_wanted(paths) and (is_last or _may_follow(paths)):
                _make_on_record(paths, make_pass)
                idle_since = time.monotonic()
            if is_last:
                break
            is_last = bool(select.select([orders], [], [], _LOOK_SECONDS)[0])


def _may_follow(paths: RunPaths) -> bool:
    last = read_last(paths)
    return last.allows_another(time.time()) or (not last.failures and _is_urgent(paths))


def _make_on_record(paths: RunPaths, make_pass: Callable[[], object]) -> None:
    last, began, spent = read_last(paths), time.time(), _spent()
    number, failures = last.number, last.failures + 1
    _write(paths, replace(last, began=began))
    try:
        for wish in (_wish(paths), _later(paths)):
            wish.unlink(missing_ok=True)
        make_pass()
        number, failures = number + 1, 0
    except BaseException:
        ask_for_pass(paths)
        raise
    finally:
        ended = time.time()
        rest = rest_after(ended - began, _spent() - spent, failures)
        _write(paths, LastPass(began, ended, number, rest, failures))


def rest_after(seconds: float, spent: float, failures: int = 0) -> float:
    """Return how long there is no other after a pass. Pure.

    Args:
        seconds: how long it took. What is slow may be Slurm or a file server: they get as long a rest, up to
            some seconds, as it may have waited for another driver all that time.
        spent: seconds of a processor that it took.
        failures: number of passes that have failed one after the other, up to this one.
    """
    return max(min(seconds, _LONGEST_PAUSE), _REST * spent, _failed_pause(failures))


def _failed_pause(failures: int) -> float:
    return _FAILED_PAUSES[min(failures, len(_FAILED_PAUSES) - 1)]


def _spent() -> float:
    """Return the seconds of a processor that this process and its children have taken."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _write(paths: RunPaths, last: LastPass) -> None:
    replace_durably(_last(paths), sealed(asdict(last)))


@dataclass
class Bookkeeper:
    """The process for passes that one worker starts. Of several ranks the first has one."""

    paths: RunPaths
    child: subprocess.Popen[bytes] | None = None
    _begun: float = float("-inf")
    """When it started its last process (monotonic)."""
    _failures: int = 0
    """Number of its processes, one after the other, that came to nothing: a full disk takes no file that says
    so. The last one is not among them."""
    _is_unsaid: bool = False
    """Whether no file says that it started the last."""

    def ask(self) -> None:
        """After a commit: ask for a pass, and start a process for it if there is none, whoever has asked
        before: that may be one who left it to others."""
        ask_for_pass(self.paths)
        self.tend()

    def tend(self) -> None:
        """While waiting, now and then: start a process for a pass that somebody has asked for."""
        if self._may_start() and is_due(self.paths, time.time()):
            self._start()

    def leave(
        self,
        is_to_be_seen: bool = True,
        is_seen_to: Callable[[], bool] = lambda: False,
        seconds: float = _LEAVING_SECONDS,
    ) -> None:
        """Before the end, when the beat says that the worker leaves: wait until a pass has seen that, or else
        until what was asked for has been granted.

        A wish that is there later may be another worker's: so passes are counted. One that is at work now may
        have looked before.

        Args:
            is_seen_to: returns whether others start a process for what is asked for; is called once that is
                written. Then it is enough that they do: many who leave at once would start one after the
                other, beside what still computes.
        """
        until = time.monotonic() + seconds
        last = read_last(self.paths)
        enough = last.number + (2 if last.is_at_work else 1)
        if is_to_be_seen:
            ask_for_pass(self.paths, at_once=True)
        if is_wanted(self.paths) and not (is_seen_to() and self._is_taken_up()):
            self._wait_for_pass(enough, until)
        self._dismiss(until)

    def _is_taken_up(self) -> bool:
        """Wait until somebody has a process for what is asked for. False: nobody has, for long: who waited
        may have got a task since."""
        until = time.monotonic() + _TAKEN_UP_SECONDS
        while time.monotonic() < until:
            if not is_wanted(self.paths) or self._has_another():
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _wait_for_pass(self, number: int, until: float) -> None:
        ask_for_pass(self.paths, at_once=True)
        while (last := read_last(self.paths)).number < number and time.monotonic() < until:
            if not last.is_at_work:
                ask_for_pass(self.paths, at_once=True)
            if self._may_start() and not self._has_another():
                self._start()
            time.sleep(_POLL_SECONDS if self.child else _ASK_AGAIN_SECONDS)

    def _has_child(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def _has_another(self) -> bool:
        """Whether another worker's process makes passes, or is about to. A batch script that is asked while
        its last pass ends makes no other: so it is asked again."""
        if holder_of(_folder(self.paths)) is not None:
            return True
        last, started = read_last(self.paths), _newest_start(self.paths)
        return find_requests() is None and is_starting(last, started, time.time())

    def _may_start(self) -> bool:
        """Whether it has no process, and the last is not one that came to nothing just now."""
        if self._has_child():
            return False
        in_vain = self._failures + self._was_in_vain()
        return time.monotonic() - self._begun >= _failed_pause(in_vain)

    def _was_in_vain(self) -> bool:
        return self._is_unsaid or (self.child is not None and bool(self.child.poll()))

    def _start(self) -> None:
        self._failures = self._failures + 1 if self._was_in_vain() else 0
        self._begun, self._is_unsaid = time.monotonic(), False
        try:
            replace_durably(_folder(self.paths) / _STARTED, f"{time.time()}\n")
        except OSError:  # others may start one too
            self._is_unsaid = True
        self.child = start_pass(self.paths)

    def _dismiss(self, until: float) -> None:
        """Have the process end, after the pass that it makes, if any."""
        if self.child is None:
            return
        if self.child.stdin is not None:
            with contextlib.suppress(OSError):
                # a line, as the end is not seen while forks of this process have the pipe too
                self.child.stdin.write(b"end\n")
                self.child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(max(0.0, until - time.monotonic()))


def start_pass(paths: RunPaths) -> subprocess.Popen[bytes] | None:
    """Start a process that makes passes: without GPUs, and with a log that all of them share. None: the batch
    script was asked for one pass, outside of the container."""
    if (fifo := find_requests()) is not None:
        if said := request_pass(fifo):
            print(f"no pass was asked for: {said}", flush=True)
        return None
    log = passes_log(paths)
    make_folder(log.parent, paths.root)
    command = [sys.executable, *(["-P"] if sys.flags.safe_path else [])]
    command += ["-m", "pipeline", "advance", str(paths.root), "--asked"]
    with log.open("ab") as output:
        environment = {**_environment_at_first(), "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def _environment_at_first() -> dict[str, str]:
    """Return the variables with which this process was started. Those that tasks have set since, of threads
    for example, are not for the jobs that a pass submits."""
    pairs = (one.partition(b"=") for one in Path("/proc/self/environ").read_bytes().split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs if name}


def passes_log(paths: RunPaths) -> Path:
    """Return the log that all passes share which workers have asked for."""
    return paths.log_root / "passes" / "passes.log"


def _folder(paths: RunPaths) -> Path:
    return paths.slurm / "passes"


def _wish(paths: RunPaths) -> Path:
    return _folder(paths) / "wanted"


def _later(paths: RunPaths) -> Path:
    return _folder(paths) / "later"


def _last(paths: RunPaths) -> Path:
    return _folder(paths) / "last"
