"""The scheduler protocol on this machine: every job a process of its own, a bounded number at a time.

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
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerProcess

from slurm.scheduler import Job, JobState, JobStatus

_GRACE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class LocalLimits:
    """How many jobs may run at once, and for how long."""

    slots: int
    pools: Mapping[str, int]
    """Pool name -> jobs of this pool that may run at once."""
    time_limit: float
    """Seconds a job may run."""


@dataclass
class _Running:
    job: Job
    process: ForkServerProcess
    deadline: float


class LocalScheduler:
    """Runs jobs as processes; ``entry`` is a ``module:function`` that takes a list of arguments."""

    def __init__(self, entry: str, preload: Sequence[str], limits: LocalLimits) -> None:
        self._entry = entry
        self._limits = limits
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        forkserver.ensure_running()  # imports go on while the driver reads its configuration
        self._queue: list[Job] = []
        self._running: dict[str, _Running] = {}
        self._ended: dict[str, JobStatus] = {}

    def submit(self, jobs: Sequence[Job]) -> None:
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
        sentinels = [running.process.sentinel for running in self._running.values()]
        wait_for_any(sentinels, timeout=max(0.0, until - now))

    def cancel(self) -> None:
        self._queue.clear()
        running = list(self._running.values())
        for item in running:
            _signal(item.process, signal.SIGTERM)
        until = time.monotonic() + _GRACE_SECONDS
        for item in running:
            item.process.join(max(0.0, until - time.monotonic()))
            _signal(item.process, signal.SIGKILL)
            item.process.join()
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
        arguments = (self._entry, job.arguments, str(job.log), dict(os.environ))
        process = self._context.Process(target=run_entry, args=arguments, daemon=False)
        process.start()
        return _Running(job, process, time.monotonic() + self._limits.time_limit)

    def _collect(self) -> None:
        for key, running in list(self._running.items()):
            if running.process.exitcode is None and time.monotonic() < running.deadline:
                continue
            self._ended[key] = self._end(running)
            del self._running[key]

    def _end(self, running: _Running) -> JobStatus:
        note = ""
        if running.process.exitcode is None:
            note = f"stopped at the time limit of {self._limits.time_limit:g} s"
            _signal(running.process, signal.SIGKILL)
            running.process.join()
        exit_code = running.process.exitcode
        _signal(running.process, signal.SIGKILL)  # what it left behind would keep its memory
        running.process.close()
        return JobStatus(JobState.ENDED, exit_code, note)


def run_entry(entry: str, arguments: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
    """Body of a job's process: its own session and log, gone when the scheduler or the server is gone."""
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
    """The server outlives a scheduler that was killed: each of its processes keeps it alive."""
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
    """Signal what is left of a job's process group, whether or not the job itself has ended."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:  # nothing is left, or it has not made its own session yet
        process.kill()
