"""Processes of this machine: every job has some of its own, and a bounded number of jobs run at a time.

Processes are forked from a server that has imported the heavy libraries once, so that a job neither pays
for the imports nor inherits another job's state. Independent of PPO: keys of jobs are opaque strings.
"""

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from pipeline.run.environment import BELL, COMMITTED, RELEASED
from pipeline.text import exit_in_words

_GRACE_SECONDS = 5.0
"""Seconds that processes may take to end when their job is cancelled, or after another rank has failed."""
_PR_SET_PDEATHSIG = 1
_MOST_SAID = 4096
"""Bytes read from a job's bell at once; its ranks say one or two each."""


@dataclass(frozen=True)
class Job:
    """One attempt at a task, as a job to run."""

    key: str
    pool: str
    """Name of the pool of slots that it belongs to."""
    arguments: tuple[str, ...]
    """Command-line arguments of the entry point."""
    log: Path
    """File for standard output and error; with several ranks, the first one's (see :func:`rank_log`)."""
    priority: int = 0
    """Order of starting where slots are few: lower numbers first."""
    ranks: int = 1
    """Number of processes that do the job together. If several, each gets its place in RANK, LOCAL_RANK,
    WORLD_SIZE and RENDEZVOUS_FILE."""


@dataclass(frozen=True)
class JobEnd:
    """End of a job. Evidence about the attempt, never about its result."""

    exit_code: int
    """Exit code, or minus the signal that ended it; with several ranks, that of the one that failed first, if
    any did."""
    note: str = ""
    """Further facts in words (a time limit, which rank failed)."""
    rank: int = 0
    """Rank that ``exit_code`` is of."""


def rank_log(log: Path, rank: int) -> Path:
    """Return the log of one rank: the job's own for the first, a file beside it for each of the others."""
    return log.with_suffix(f".rank-{rank}{log.suffix}") if rank else log


def was_killed(exit_code: int | None) -> bool:
    """Whether a signal from outside ended the process. SIGABRT is not one: a process aborts by itself."""
    return exit_code is not None and exit_code < 0 and exit_code != -signal.SIGABRT


@dataclass(frozen=True)
class LocalLimits:
    """Limits on how many jobs run at once, and for how long."""

    slots: int
    pools: Mapping[str, int]
    """Jobs of each pool that may run at once, by the pool's name."""
    time_limit: float
    """Seconds a job may run."""


@dataclass
class _Running:
    job: Job
    processes: Sequence[ForkServerProcess]
    """Processes of the job by rank."""
    rendezvous: Path
    deadline: float
    bell: Connection
    """End of a pipe to read what the job's ranks say while they run."""
    has_committed: bool = False
    """Whether its result is committed, and what goes on is saving what follows needs."""
    released: int = 0
    """Number of ranks that have given their devices back."""
    failed_rank: int | None = None
    """Rank that failed first; the others cannot go on without it."""
    clean: set[int] = field(default_factory=set)
    """Ranks that have ended and whose left-over processes were killed."""
    known_unfinished: int = 0
    """Number of ranks that ran when the job was last looked at."""

    @property
    def unfinished(self) -> list[ForkServerProcess]:
        return [process for process in self.processes if process.exitcode is None]

    @property
    def is_released(self) -> bool:
        """Whether only files are still written: the job's slot is another job's."""
        return self.released >= self.job.ranks


class LocalExecutor:
    """Queue that runs jobs as processes; ``entry`` is a ``module:function`` taking a list of arguments."""

    def __init__(self, entry: str, preload: Sequence[str], limits: LocalLimits) -> None:
        self._entry = entry
        self._limits = limits
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._queue: list[Job] = []
        self._running: dict[str, _Running] = {}

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; they start as slots become free, by priority, then in this order."""
        _start_server()  # its imports go on while the driver does; a run that is done needs none
        self._queue = sorted([*self._queue, *jobs], key=lambda job: job.priority)

    def collect_ended(self) -> Mapping[str, JobEnd]:
        """Return, by key, the jobs that have ended since this was last asked."""
        ended = {}
        for key, running in list(self._running.items()):
            unfinished = running.unfinished
            running.known_unfinished = len(unfinished)
            _note_failure(running)
            _remove_leftovers(running)
            if not unfinished or time.monotonic() >= running.deadline:
                ended[key] = self._end(running)
                del self._running[key]
        return ended

    @property
    def is_busy(self) -> bool:
        """Whether a job runs that was not collected."""
        return bool(self._running)

    def wait(self, seconds: float) -> None:
        """Start the jobs that fit; return when a job or one of its ranks ends, when a job has committed and
        released its slot, or after ``seconds``."""
        # Not before: what the caller submits in answer to an ended job may be more urgent than what waits.
        self._start_what_fits()
        until = time.monotonic() + seconds
        is_over = False
        while not is_over and (left := until - time.monotonic()) > 0:
            is_over = self._wait_for_news(left)

    def _wait_for_news(self, seconds: float) -> bool:
        """Wait for anything to happen. Returns whether it is of interest to the caller."""
        unfinished = [(one, one.unfinished) for one in self._running.values()]
        if any(len(processes) < one.known_unfinished for one, processes in unfinished):
            return True  # who has ended is not waited for any more, and would be slept through
        running = [one for one in self._running.values() if not one.is_released]
        bells = {one.bell: one for one in running if not one.bell.closed}
        sentinels = [process.sentinel for _, processes in unfinished for process in processes]
        now = time.monotonic()
        until = min([now + seconds, *(one.deadline for one in self._running.values())])
        ready = wait_for_any([*sentinels, *bells], timeout=max(0.0, until - now))
        rung = [bells[bell] for bell in ready if isinstance(bell, Connection)]
        for one in rung:
            _listen(one)
        return len(rung) < len(ready) or not ready or any(one.is_released for one in rung)

    def cancel(self, spares_committed: bool = False) -> None:
        """Stop every running job and drop the queued ones.

        Args:
            spares_committed: let jobs go on that have committed and save what follows needs.
        """
        self._queue.clear()
        for one in self._running.values():
            if not one.bell.closed and one.bell.poll():
                _listen(one)
        stopped = [one for one in self._running.values() if not (spares_committed and one.has_committed)]
        processes = [process for running in stopped for process in running.unfinished]
        for process in processes:
            _signal(process, signal.SIGTERM)
        until = time.monotonic() + _GRACE_SECONDS
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            _signal(process, signal.SIGKILL)
            process.join()
        self.collect_ended()

    def _start_what_fits(self) -> None:
        waiting = []
        for job in self._queue:
            if self._fits(job):
                self._running[job.key] = self._start(job)
            else:
                waiting.append(job)
        self._queue = waiting

    def _fits(self, job: Job) -> bool:
        in_pool = sum(running.job.pool == job.pool for running in self._running.values())
        in_all = sum(not running.is_released for running in self._running.values())
        return in_all < self._limits.slots and in_pool < self._limits.pools[job.pool]

    def _start(self, job: Job) -> _Running:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        rendezvous = job.log.with_suffix(f".{os.urandom(4).hex()}.rendezvous")
        processes = []
        bell, ringer = self._context.Pipe(duplex=False)
        with ringer:
            for rank in range(job.ranks):
                environment = dict(os.environ) | rank_variables(rank, job.ranks, rendezvous)
                arguments = (self._entry, job.arguments, str(rank_log(job.log, rank)), environment, ringer)
                processes.append(self._context.Process(target=run_entry, args=arguments, daemon=False))
                processes[-1].start()
        until = time.monotonic() + self._limits.time_limit
        return _Running(job, processes, rendezvous, until, bell, known_unfinished=job.ranks)

    def _end(self, running: _Running) -> JobEnd:
        note = ""
        if running.unfinished and running.failed_rank is None:
            note = f"stopped at the time limit of {self._limits.time_limit:g} s"
        for process in running.unfinished:
            _signal(process, signal.SIGKILL)
            process.join()
        _remove_leftovers(running)
        codes = [process.exitcode for process in running.processes]
        for process in running.processes:
            process.close()
        running.bell.close()
        running.rendezvous.unlink(missing_ok=True)
        if running.failed_rank is None:
            return JobEnd(next((code for code in codes if code), 0), note)
        exit_code, ranks = codes[running.failed_rank], running.job.ranks
        assert exit_code is not None
        note = f"rank {running.failed_rank} of {ranks} {exit_in_words(exit_code)}" if ranks > 1 else ""
        return JobEnd(exit_code, note, running.failed_rank)


def _listen(running: _Running) -> None:
    """Read what the ranks said. Each releases its devices once."""
    said = os.read(running.bell.fileno(), _MOST_SAID)
    running.released += said.count(RELEASED)
    running.has_committed |= COMMITTED in said
    if not said:  # every rank has ended
        running.bell.close()


def _start_server() -> None:
    """Start the fork server, unless it runs. Ctrl-C (SIGINT) is blocked in the server and its processes: the
    executor handles it, and ends them by SIGTERM.
    """
    resource_tracker.ensure_running()  # it lets Ctrl-C through when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _note_failure(running: _Running) -> None:
    """Note which rank failed first, and shorten the job's deadline. Where several failed since the last look,
    take one that was killed: the others' errors only say that their peer is gone.
    """
    if running.failed_rank is not None:
        return
    failed = [rank for rank, process in enumerate(running.processes) if process.exitcode]
    if failed:
        killed = [rank for rank in failed if was_killed(running.processes[rank].exitcode)]
        running.failed_rank = (killed or failed)[0]
        running.deadline = min(running.deadline, time.monotonic() + _GRACE_SECONDS)


def _remove_leftovers(running: _Running) -> None:
    """Kill processes that ended ranks left behind: they keep memory. Once, since process ids are reused."""
    for rank, process in enumerate(running.processes):
        if process.exitcode is not None and rank not in running.clean:
            _signal(process, signal.SIGKILL)
            running.clean.add(rank)


def rank_variables(rank: int, size: int, rendezvous: Path) -> dict[str, str]:
    """Return the environment variables of one of several ranks. They clear a master address in the user's own
    environment, which is not for these ranks.
    """
    if size == 1:
        return {}
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    return place | {"RENDEZVOUS_FILE": str(rendezvous), "MASTER_ADDR": "", "MASTER_PORT": ""}


def run_entry(
    entry: str, arguments: Sequence[str], log: str, environment: Mapping[str, str], bell: Connection
) -> None:
    """Run the entry point in a job's process, with its own session and log. The process dies with the
    executor or the server.

    Args:
        bell: end of a pipe to write to, for :mod:`stages.bell`.
    """
    os.setsid()
    threading.Thread(target=_end_with_executor, daemon=True).start()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the server was gone before the line above
        sys.exit("the executor is gone")
    os.environ.clear()
    os.environ.update({**environment, BELL: str(bell.fileno())})
    _redirect_output(log)
    module, _, function = entry.partition(":")
    sys.exit(getattr(importlib.import_module(module), function)(list(arguments)))


def _end_with_executor() -> None:
    """Kill this job once the executor is gone: the server outlives it, as its processes keep it alive."""
    executor = multiprocessing.parent_process()
    assert executor is not None
    wait_for_any([executor.sentinel])
    os.killpg(0, signal.SIGKILL)


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)


def _signal(process: ForkServerProcess, number: signal.Signals) -> None:
    """Signal what is left of a job's process group, even if its first process has ended."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:  # nothing is left, or it has not made its own session yet
        process.kill()
