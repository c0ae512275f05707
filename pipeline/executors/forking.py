"""Processes that are forked from a server which has imported the heavy libraries once: the ranks of a worker.

Each begins a session of its own, in which its entry point, a ``module:function``, gets the words that it was
started with. It dies with the process that had it started, or the server.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from pipeline.process import end_with_parent
from pipeline.run.environment import BELL


@dataclass(frozen=True)
class Rank:
    """What one process is started with."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    """File for standard output and error, which are appended to it."""


def fork(entry: str, ranks: Sequence[Rank]) -> tuple[list[ForkServerProcess], Connection]:
    """Start a process for each rank. Returns them, and the end of a pipe with what they ring."""
    context = multiprocessing.get_context("forkserver")
    processes = []
    bell, ringer = context.Pipe(duplex=False)
    with ringer:
        for rank in ranks:
            process = context.Process(target=_run_entry, args=(entry, rank, ringer), daemon=False)
            process.start()
            processes.append(process)
    return processes, bell


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


def _run_entry(entry: str, rank: Rank, bell: Connection) -> None:
    os.setsid()
    threading.Thread(target=_end_with_driver, daemon=True).start()
    end_with_parent(signal.SIGKILL)
    if os.getppid() == 1:  # the server was gone before the line above
        sys.exit("the driver is gone")
    _redirect(os.open(os.devnull, os.O_RDONLY), 0)
    _redirect(os.open(rank.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), 1, 2)
    os.environ.clear()
    os.environ.update({**rank.environment, BELL: str(bell.fileno())})
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
