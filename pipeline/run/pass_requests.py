"""Requests for passes, and the process that serves them: one at a time, for a tenth of a core at most.

A worker that commits, fails or leaves, or that waits and knows of no pass for long, writes a request: a file
in the run's ``slurm/passes/``. A pass removes it before it looks, so a request written during a pass is for
the next. The process that makes passes is a worker's child. Starting it costs more than a pass, so it serves
all workers of the run until its worker leaves or requests cease. It holds a lease, so that one serves.
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

from pipeline.process import ended_within
from pipeline.run.durable import replace_durably
from pipeline.run.lease import LeaseHeld, hold, holder_of
from pipeline.run.paths import RunPaths
from slurm.requests import find_requests, request_pass_outside
from slurm.sharedfiles import is_there, make_folder, names_in, read_newest, sealed, unsealed

_REST = 9.0
"""Times what a pass took of a processor, for which there is no other: passes take a tenth of a core."""
_LONGEST_PAUSE = 5.0
"""Most seconds without a pass after one that took long, but of a processor."""
_FAILED_PAUSES = (0.0, 5.0, 10.0, 20.0, 40.0, 60.0)
"""Least seconds without a pass after none, one, two or more that have failed one after the other."""
_IDLE_SECONDS = 60.0
"""Seconds without a request after which the process that makes passes ends."""
_LEAVING_SECONDS = 120.0
"""Seconds that a worker which leaves waits for a pass that has seen it leave."""
_HANDLED_SECONDS = 10.0
"""Two polling periods of a waiting worker on a network filesystem."""
_STARTING_SECONDS = 10.0
"""Seconds that a process may take until it makes its pass, before another is started."""
_STARTED = "started"
_POLL_SECONDS = 0.1
_REQUEST_POLL_SECONDS = 0.25
"""Polling period of the process that makes passes."""
_LONGEST_LATER = 120.0
"""Most seconds that a request may be deferred: one that is further ahead comes from a clock that is."""
_URGENT = "now"
"""Prefix of an urgent request: skips the back-off."""
_REPEAT_SECONDS = 0.5
"""Seconds after which a request to the batch script is repeated, which needs a while to start a pass."""


@dataclass(frozen=True)
class LastPass:
    """The newest requested pass. Unix times."""

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
        """When a pass last looked, or began to. One that was killed counts for as long as any."""
        return max(self.began, self.ended)

    def allows_another(self, now: float) -> bool:
        """Whether its back-off is over. Pure. A time in the future does not count."""
        return not 0 <= now - self.ended < self.rest


def request_pass(paths: RunPaths, at_once: bool = False) -> bool:
    """Request a pass: something has happened that it should see. A request that is there already does: it is
    removed before the pass looks.

    Args:
        at_once: skip the back-off after the last pass.

    Returns:
        Whether it was not there already.
    """
    if is_there(_request_file(paths)) and (not at_once or _is_urgent(paths)):
        return False
    make_folder(_folder(paths), paths.root)
    replace_durably(_request_file(paths), f"{_URGENT} {time.time()}\n" if at_once else f"{time.time()}\n")
    return True


def request_pass_later(paths: RunPaths, seconds: float) -> None:
    """Request a pass in some seconds, unless one is made before. Of two such requests the sooner counts."""
    now = time.time()
    if now < (_later_at(paths) or 0.0) <= now + seconds:
        return
    make_folder(_folder(paths), paths.root)
    replace_durably(_later_file(paths), f"{now + seconds}\n")


def is_requested(paths: RunPaths) -> bool:
    """Whether a pass is requested, by now also one that was deferred."""
    names = names_in(_folder(paths))
    return _request_file(paths).name in names or (
        _later_file(paths).name in names and _is_time(paths, time.time())
    )


def _is_time(paths: RunPaths, now: float) -> bool:
    at = _later_at(paths)
    return at is not None and not 0 < at - now <= _LONGEST_LATER


def _later_at(paths: RunPaths) -> float | None:
    """Return when there is to be a pass (unix time); None where that is not known."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return float(read_newest(_later_file(paths)))
    return None


def _is_urgent(paths: RunPaths) -> bool:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return read_newest(_request_file(paths)).startswith(_URGENT.encode())
    return False


def is_due(paths: RunPaths, now: float) -> bool:
    """Whether to start a process for a pass: one is requested, no process serves it or is about to, and the
    last pass's back-off is over."""
    if not is_requested(paths) or holder_of(_folder(paths)) is not None:
        return False
    last = read_last(paths)
    return last.allows_another(now) and not is_starting(last, _newest_start(paths), now)


def is_starting(last: LastPass, started: float, now: float) -> bool:
    """Whether a process for a pass was started just now, and has not begun it yet. Pure.

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
        return LastPass(**unsealed(read_newest(_last_file(paths))))
    except (OSError, ValueError, TypeError):
        return LastPass()


def serve_requests(paths: RunPaths, make_pass: Callable[[], object], end: int) -> None:
    """Make the requested passes until ``end`` is readable or requests have ceased. Does nothing where another
    process serves them.

    A failed pass keeps its request and re-raises; retries back off.

    Args:
        end: file descriptor that becomes readable when it is time to end. What is requested then gets one
            more pass.

    Raises:
        LeaseLost: another process took over.
    """
    make_folder(_folder(paths), paths.root)
    with contextlib.suppress(LeaseHeld), hold(_folder(paths)) as lease:
        idle_since, is_last = time.monotonic(), False
        while time.monotonic() - idle_since < _IDLE_SECONDS:
            lease.beat()
            if is_requested(paths) and (is_last or _may_serve(paths)):
                _serve(paths, make_pass)
                idle_since = time.monotonic()
            if is_last:
                break
            is_last = bool(select.select([end], [], [], _REQUEST_POLL_SECONDS)[0])


def _may_serve(paths: RunPaths) -> bool:
    last = read_last(paths)
    return last.allows_another(time.time()) or (not last.failures and _is_urgent(paths))


def _serve(paths: RunPaths, make_pass: Callable[[], object]) -> None:
    last, began, spent = read_last(paths), time.time(), _spent()
    number, failures = last.number, last.failures + 1
    _write(paths, replace(last, began=began))
    try:
        for request in (_request_file(paths), _later_file(paths)):
            request.unlink(missing_ok=True)
        make_pass()
        number, failures = number + 1, 0
    except BaseException:
        request_pass(paths)
        raise
    finally:
        ended = time.time()
        rest = rest_after(ended - began, _spent() - spent, failures)
        _write(paths, LastPass(began, ended, number, rest, failures))


def rest_after(seconds: float, spent: float, failures: int = 0) -> float:
    """Return the back-off after a pass. Pure.

    Args:
        seconds: how long it took. What is slow may be Slurm or a file server, which get as long a rest, up to
            some seconds.
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
    replace_durably(_last_file(paths), sealed(asdict(last)))


@dataclass
class PassRunner:
    """The process for passes that one worker starts. Of several ranks the first has one."""

    paths: RunPaths
    child: subprocess.Popen[bytes] | None = None
    _begun: float = float("-inf")
    """When it started its last process (monotonic)."""
    _failures: int = 0
    """Number of its processes, one after the other, that failed; without the last one."""
    _is_unsaid: bool = False
    """Whether no file says that it started the last: a full disk takes none."""

    def request(self) -> None:
        """Request a pass, and start a process for it if there is none."""
        request_pass(self.paths)
        self.poll()

    def poll(self) -> None:
        """Start a process for a request that none serves. Called now and then in a wait."""
        if self._may_start() and is_due(self.paths, time.time()):
            self._start()

    def leave(
        self,
        must_be_seen: bool = True,
        is_handled: Callable[[], bool] = lambda: False,
        seconds: float = _LEAVING_SECONDS,
    ) -> None:
        """Wait until a pass has seen the heartbeat which says that the worker leaves, or else until what is
        requested has been served. Then end the process for passes.

        A request that is there later may be another worker's: so passes are counted. One that is running now
        may have looked before.

        Args:
            is_handled: returns whether other workers start a process for the request; called once that is
                written. Then it is enough that they do: many that leave at once would start one after the
                other, beside what still computes.
        """
        until = time.monotonic() + seconds
        last = read_last(self.paths)
        enough = last.number + (2 if last.is_at_work else 1)
        if must_be_seen:
            request_pass(self.paths, at_once=True)
        if is_requested(self.paths) and not (is_handled() and self._is_served()):
            self._wait_for_pass(enough, until)
        self._end_child(until)

    def _is_served(self) -> bool:
        """Wait until another process serves the request. False: none does for long, as a waiting worker may
        have got a task since."""
        until = time.monotonic() + _HANDLED_SECONDS
        while time.monotonic() < until:
            if not is_requested(self.paths) or self._has_another():
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _wait_for_pass(self, number: int, until: float) -> None:
        request_pass(self.paths, at_once=True)
        while (last := read_last(self.paths)).number < number and time.monotonic() < until:
            if not last.is_at_work:
                request_pass(self.paths, at_once=True)
            if self._may_start() and not self._has_another():
                self._start()
            time.sleep(_POLL_SECONDS if self.child else _REPEAT_SECONDS)

    def _has_another(self) -> bool:
        """Whether another worker's process makes passes, or is about to. A batch script that gets a request
        while its last pass ends makes no other: so it is repeated."""
        if holder_of(_folder(self.paths)) is not None:
            return True
        last, started = read_last(self.paths), _newest_start(self.paths)
        return find_requests() is None and is_starting(last, started, time.time())

    def _may_start(self) -> bool:
        """Whether it has no process, and the back-off after one that failed is over."""
        if self.child is not None and self.child.poll() is None:
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

    def _end_child(self, until: float) -> None:
        """End the process, after the pass that it makes, if any."""
        if self.child is None:
            return
        if self.child.stdin is not None:
            with contextlib.suppress(OSError):
                # a line, as the end is not seen while forks of this process have the pipe too
                self.child.stdin.write(b"end\n")
                self.child.stdin.close()
        ended_within(self.child, until - time.monotonic())


def start_pass(paths: RunPaths) -> subprocess.Popen[bytes] | None:
    """Start a process that makes passes: without GPUs, and with a log that all share. None: one pass was
    requested of the batch script, outside of the container."""
    if (fifo := find_requests()) is not None:
        if said := request_pass_outside(fifo):
            print(f"no pass was requested: {said}", flush=True)
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
    """Return the log that all requested passes share."""
    return paths.log_root / "passes" / "passes.log"


def _folder(paths: RunPaths) -> Path:
    return paths.slurm / "passes"


def _request_file(paths: RunPaths) -> Path:
    return _folder(paths) / "wanted"


def _later_file(paths: RunPaths) -> Path:
    return _folder(paths) / "later"


def _last_file(paths: RunPaths) -> Path:
    return _folder(paths) / "last"
