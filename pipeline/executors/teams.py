"""The processes that do jobs of one pool together, one for each rank: made, given orders, heard, ended."""

import contextlib
import multiprocessing
import os
import select
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from pipeline.executors.assignment import Grant
from pipeline.executors.orders import Order, run_entry

_MOST_SAID = 4096
"""Bytes read from a bell at once; the ranks of a job say one or two each."""


@dataclass
class Team:
    """Processes by rank, with a connection to each and one bell for all."""

    pool: str
    processes: Sequence[ForkServerProcess]
    connections: Sequence[Connection]
    bell: Connection
    """End of a pipe to read what the ranks say while they do a job."""
    grant: Grant = ()
    """What the processes were given, which they have until they are gone."""
    clean: set[int] = field(default_factory=set)
    """Ranks that have ended and whose left-over processes were killed."""

    @property
    def living(self) -> list[ForkServerProcess]:
        return [process for process in self.processes if process.exitcode is None]

    def is_whole(self) -> bool:
        return len(self.living) == len(self.processes)

    def give(self, orders: Sequence[Order]) -> None:
        """Give each rank its order. One that is gone has not begun it, which is seen later."""
        for connection, order in zip(self.connections, orders, strict=True):
            with contextlib.suppress(OSError):
                connection.send(order)

    def hear(self, rank: int) -> list[str | int]:
        """Return what a rank has said since it was last heard: BEGUN, or the exit code of its order."""
        said = []
        with contextlib.suppress(EOFError, OSError):
            while self.connections[rank].poll():
                said.append(self.connections[rank].recv())
        return said

    def calls(self, codes: Sequence[int | None]) -> list[Connection | int]:
        """Return what is ready when a rank ends or says something, of those without an exit code."""
        ranks = [rank for rank, code in enumerate(codes) if code is None]
        ends: list[Connection | int] = [self.connections[rank] for rank in ranks]
        return [*ends, *(self.processes[rank].sentinel for rank in ranks)]

    def hear_bell(self) -> bytes:
        """Return what the ranks have rung since this was last asked: COMMITTED, RELEASED."""
        if self.bell.closed or not select.select([self.bell], [], [], 0)[0]:
            return b""
        said = os.read(self.bell.fileno(), _MOST_SAID)
        if not said:  # every rank has ended
            self.bell.close()
        return said

    def let_go(self) -> None:
        """Tell all processes that there is no further order."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send(None)

    def terminate(self) -> None:
        for process in self.living:
            signal_group(process, signal.SIGTERM)

    def remove_leftovers(self) -> None:
        """Kill processes that ended ranks left behind: they keep memory. Once, as process ids are reused."""
        for rank, process in enumerate(self.processes):
            if process.exitcode is not None and rank not in self.clean:
                signal_group(process, signal.SIGKILL)
                self.clean.add(rank)

    def kill(self) -> list[int]:
        """Kill what is left, with all that the processes have started. Returns the exit codes."""
        for process in self.living:
            signal_group(process, signal.SIGKILL)
            process.join()
        self.remove_leftovers()
        codes = [process.exitcode or 0 for process in self.processes]
        for process in self.processes:
            process.close()
        for end in (*self.connections, self.bell):
            end.close()
        return codes


def fork(pool: str, entry: str, orders: Sequence[Order], grant: Grant = ()) -> Team:
    """Start a process for each order, and return them as a team.

    Args:
        entry: ``module:function`` that gets the process's orders.
    """
    context = multiprocessing.get_context("forkserver")
    processes, connections = [], []
    bell, ringer = context.Pipe(duplex=False)
    with ringer:
        for order in orders:
            ours, theirs = context.Pipe()
            with theirs:
                process = context.Process(target=run_entry, args=(entry, order, theirs, ringer), daemon=False)
                process.start()
            processes.append(process)
            connections.append(ours)
    return Team(pool, processes, connections, bell, grant)


def preload(modules: Sequence[str]) -> None:
    """Name the modules that the server of processes imports when it starts."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


def start_server() -> None:
    """Start the fork server, unless it runs. Ctrl-C (SIGINT) is blocked in the server and its processes: the
    executor handles it, and ends them by SIGTERM.
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
