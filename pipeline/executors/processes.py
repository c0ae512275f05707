"""A scheduler of this machine: every job runs as processes of its own, a bounded number of jobs at a time.

Processes are forked from a server that has imported the heavy libraries once, so that a job neither pays
for the imports nor inherits another job's state.
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
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from pipeline.executors.scheduler import Job, JobState, JobStatus, rank_log, was_killed

_GRACE_SECONDS = 5.0
"""Seconds that processes may take to end when their job is cancelled, or after another rank has failed."""
_PR_SET_PDEATHSIG = 1


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
    failed_rank: int | None = None
    """Rank that failed first; the others cannot go on without it."""
    clean: set[int] = field(default_factory=set)
    """Ranks that have ended and whose left-over processes were killed."""

    @property
    def unfinished(self) -> list[ForkServerProcess]:
        return [process for process in self.processes if process.exitcode is None]


class LocalScheduler:
    """Scheduler of jobs as processes; ``entry`` is a ``module:function`` that takes a list of arguments."""

    def __init__(self, entry: str, preload: Sequence[str], limits: LocalLimits) -> None:
        self._entry = entry
        self._limits = limits
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._queue: list[Job] = []
        self._running: dict[str, _Running] = {}
        self._ended: dict[str, JobStatus] = {}

    def submit(self, jobs: Sequence[Job]) -> None:
        _start_server()  # its imports go on while the driver does; a run that is done needs none
        self._queue = sorted([*self._queue, *jobs], key=lambda job: job.priority)

    def query(self) -> Mapping[str, JobStatus]:
        self._collect()
        pending = {job.key: JobStatus(JobState.PENDING) for job in self._queue}
        running = {key: JobStatus(JobState.RUNNING) for key in self._running}
        return pending | running | self._ended

    def forget(self, key: str) -> None:
        self._ended.pop(key, None)

    def wait(self, seconds: float) -> None:
        # Not before: what the caller submits in answer to an ended job may be more urgent than what waits.
        self._start_what_fits()
        now = time.monotonic()
        until = min([now + seconds, *(running.deadline for running in self._running.values())])
        sentinels = [p.sentinel for running in self._running.values() for p in running.unfinished]
        wait_for_any(sentinels, timeout=max(0.0, until - now))

    def cancel(self) -> None:
        self._queue.clear()
        processes = [process for running in self._running.values() for process in running.unfinished]
        for process in processes:
            _signal(process, signal.SIGTERM)
        until = time.monotonic() + _GRACE_SECONDS
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            _signal(process, signal.SIGKILL)
            process.join()
        self._collect()

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
        return len(self._running) < self._limits.slots and in_pool < self._limits.pools[job.pool]

    def _start(self, job: Job) -> _Running:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        rendezvous = job.log.with_suffix(f".{os.urandom(4).hex()}.rendezvous")
        processes = []
        for rank in range(job.ranks):
            environment = dict(os.environ) | rank_variables(rank, job.ranks, rendezvous)
            arguments = (self._entry, job.arguments, str(rank_log(job.log, rank)), environment)
            processes.append(self._context.Process(target=run_entry, args=arguments, daemon=False))
            processes[-1].start()
        return _Running(job, processes, rendezvous, time.monotonic() + self._limits.time_limit)

    def _collect(self) -> None:
        for key, running in list(self._running.items()):
            unfinished = running.unfinished
            _note_failure(running)
            _remove_leftovers(running)
            if unfinished and time.monotonic() < running.deadline:
                continue
            self._ended[key] = self._end(running)
            del self._running[key]

    def _end(self, running: _Running) -> JobStatus:
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
        running.rendezvous.unlink(missing_ok=True)
        if running.failed_rank is None:
            return JobStatus(JobState.ENDED, next((code for code in codes if code), 0), note)
        return _failed(running.job, running.failed_rank, codes[running.failed_rank])


def _start_server() -> None:
    """Start the fork server, unless it runs. Ctrl-C (SIGINT) is blocked in the server and its processes: the
    scheduler handles it, and ends them by SIGTERM.
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


def _failed(job: Job, rank: int, exit_code: int | None) -> JobStatus:
    """Return the status of a job one of whose ranks failed; it names the rank where there are several."""
    assert exit_code is not None
    if job.ranks == 1:
        return JobStatus(JobState.ENDED, exit_code)
    how = f"killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
    return JobStatus(JobState.ENDED, exit_code, f"rank {rank} of {job.ranks} {how}", rank)


def rank_variables(rank: int, size: int, rendezvous: Path) -> dict[str, str]:
    """Return the environment variables of one of several ranks. They clear a master address in the user's own
    environment, which is not for these ranks.
    """
    if size == 1:
        return {}
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    return place | {"RENDEZVOUS_FILE": str(rendezvous), "MASTER_ADDR": "", "MASTER_PORT": ""}


def run_entry(entry: str, arguments: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
    """Run the entry point in a job's process, with its own session and log. The process dies with the
    scheduler or the server.
    """
    os.setsid()
    threading.Thread(target=_end_with_scheduler, daemon=True).start()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the server was gone before the line above
        sys.exit("the scheduler is gone")
    os.environ.clear()
    os.environ.update(environment)
    _redirect_output(log)
    module, _, function = entry.partition(":")
    sys.exit(getattr(importlib.import_module(module), function)(list(arguments)))


def _end_with_scheduler() -> None:
    """Kill this job once the scheduler is gone: the server outlives it, as its processes keep it alive."""
    scheduler = multiprocessing.parent_process()
    assert scheduler is not None
    wait_for_any([scheduler.sentinel])
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
