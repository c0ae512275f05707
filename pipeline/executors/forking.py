"""Processes that are forked from a server which has imported the heavy libraries once: the ranks of a worker.

Each begins a session of its own, in which its entry point, a ``module:function``, gets the words that it was
started with. It dies with the process that had it started, or the server.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from pipeline.process import end_with_parent, joined_within
from pipeline.run.environment import PARENT_PIPE
from pipeline.text import exit_in_words
from slurm.errors import UnfinishedError

KILLED_SECONDS = 60.0
"""Seconds in which a process that was killed is gone, unless it hangs: to free memory takes some."""
_MOST_SERVERS = 3
"""Servers that are started for one worker: one that ends by itself would do so each time."""
_GONE = (EOFError, ConnectionError)
"""What asking a server for a process raises that has ended, or ends meanwhile."""
_ENDING_SECONDS, _LOOK_SECONDS = 5.0, 0.01


@dataclass(frozen=True)
class Rank:
    """What one process is started with."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    """File for standard output and error, which are appended to it."""


def fork(entry: str, ranks: Sequence[Rank]) -> tuple[list[ForkServerProcess], Connection]:
    """Start a process for each rank, from another server where the one that runs ends meanwhile. Returns
    them, and the end of a pipe that has what they write.

    Raises:
        UnfinishedError: each server has ended before its processes were there.
    """
    ended = ""
    for _ in range(_MOST_SERVERS):
        start_server()
        with contextlib.suppress(*_GONE):
            return _fork_all(entry, ranks)
        ended = _end_of_server()
    raise UnfinishedError(
        f"{os.uname().nodename}: the server that workers are forked from (by process {os.getpid()}) was "
        f"{ended}, {_MOST_SERVERS} times, before one was there: what it imports fails (see above), or memory "
        "ran out (see dmesg); fix that and run slurm-ppo resume with the run directory: nothing that was "
        "committed is lost"
    )


def _end_of_server() -> str:
    """Wait until the server is gone whose sockets are closed: it is only then that another one is started.
    Returns how it ended, in words; it is left for multiprocessing to collect."""
    server, until = forkserver._forkserver._forkserver_pid, time.monotonic() + _ENDING_SECONDS  # type: ignore[attr-defined]
    how = os.WEXITED | os.WNOWAIT | os.WNOHANG
    while (found := os.waitid(os.P_PID, server, how)) is None and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    if found is None:  # it lives: what it forked was killed before it could say its number
        return "losing its processes"
    code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
    return exit_in_words(code)


def _fork_all(entry: str, ranks: Sequence[Rank]) -> tuple[list[ForkServerProcess], Connection]:
    """Start a process for each rank; where one cannot be started, none is left. Raises what is in _GONE."""
    context = multiprocessing.get_context("forkserver")
    processes = []
    pipe, writer = context.Pipe(duplex=False)
    with writer:
        try:
            for rank in ranks:
                process = context.Process(target=_run_entry, args=(entry, rank, writer), daemon=False)
                process.start()
                processes.append(process)
        except _GONE:
            pipe.close()
            for process in processes:
                signal_group(process, signal.SIGKILL)
                joined_within(process, KILLED_SECONDS)
            raise
    return processes, pipe


def preload(modules: Sequence[str]) -> None:
    """Name the modules that the server of processes imports when it starts."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


def start_server() -> None:
    """Start the fork server, unless it runs. Ctrl-C (SIGINT) is blocked in the server and its processes: the
    driver handles it, and ends them by SIGTERM.
    """
    resource_tracker.ensure_running()  # it lets Ctrl-C through when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signal_group(process: ForkServerProcess, number: signal.Signals) -> None:
    """Signal what is left of a process group, even if its first process has ended."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:  # nothing is left, or it has not made its own session yet
        process.kill()


def _run_entry(entry: str, rank: Rank, pipe: Connection) -> None:
    os.setsid()
    threading.Thread(target=_end_with_driver, daemon=True).start()
    end_with_parent(signal.SIGKILL)
    if os.getppid() == 1:  # the server was gone before the line above
        sys.exit("the driver is gone")
    _redirect(os.open(os.devnull, os.O_RDONLY), 0)
    _redirect(os.open(rank.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), 1, 2)
    os.environ.clear()
    os.environ.update({**rank.environment, PARENT_PIPE: str(pipe.fileno())})
    # As in a process that was not forked from a server; that server's locks are reported as leaked when a
    # process that has some is signalled.
    multiprocessing.set_start_method(None, force=True)
    module, _, function = entry.partition(":")
    sys.exit(getattr(importlib.import_module(module), function)(rank.words))


def _end_with_driver() -> None:
    """Kill this process once the driver is gone: the server outlives it, as its processes keep it alive."""
    driver = parent_process()
    assert driver is not None
    wait_for_any([driver.sentinel])
    os.killpg(0, signal.SIGKILL)


def _redirect(descriptor: int, *targets: int) -> None:
    for target in targets:
        os.dup2(descriptor, target)
    os.close(descriptor)
