"""The life of a process that was forked for jobs: one order after the other, until there is none.

The entry point is a ``module:function`` that gets its :class:`Orders`, and returns the process's exit code.
"""

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any

from pipeline.run.environment import BELL

BEGUN = "begun"
"""What a process says when it begins an order; when it has done one and stays, it says the exit code, 0."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Order:
    """A job, as one of its ranks gets it."""

    arguments: tuple[str, ...]
    log: str
    """File for standard output and error, which are appended to it."""
    environment: Mapping[str, str]
    stays: bool
    """Whether the process may get another order after this one."""


class Orders:
    """The orders of this process, one at a time."""

    def __init__(self, first: Order, connection: Connection) -> None:
        self._order: Order | None = first
        self._connection = connection
        self._entered: Order | None = None
        self._is_over = False
        self._enter(first)

    def next(self) -> Order | None:
        """Return the next order, waiting for it. None: there is none any more, so leave."""
        if self._is_over:
            return None
        if self._order is None:
            with contextlib.suppress(EOFError, OSError):
                self._order = self._connection.recv()
        order, self._order = self._order, None
        return order

    def begin(self, order: Order) -> None:
        """Accept an order. From here on the process's failure is that of the job, which would else be given
        to another process."""
        self._enter(order)
        self._connection.send(BEGUN)

    def ended(self, exit_code: int) -> None:
        """Say that the order is carried out. After a failure, or the last order, the process ends, which says
        it."""
        assert self._entered is not None
        self._is_over = exit_code != 0 or not self._entered.stays
        if not self._is_over:
            _flush()
            self._connection.send(exit_code)

    def _enter(self, order: Order) -> None:
        """Take over an order's environment and log."""
        if order is self._entered:
            return
        _flush()
        _change_environment(self._entered.environment if self._entered else None, order.environment)
        _redirect_output(order.log)
        self._entered = order


def run_entry(entry: str, first: Order, connection: Connection, bell: Connection) -> None:
    """Run the entry point in a process with its own session. It dies with the executor or the server.

    Args:
        bell: end of a pipe to write to, for :mod:`stages.process.bell`.
    """
    os.setsid()
    threading.Thread(target=_end_with_executor, daemon=True).start()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the server was gone before the line above
        sys.exit("the executor is gone")
    _close_input()
    orders = Orders(first, connection)
    os.environ[BELL] = str(bell.fileno())
    module, _, function = entry.partition(":")
    sys.exit(getattr(importlib.import_module(module), function)(orders))


def _end_with_executor() -> None:
    """Kill this process once the executor is gone: the server outlives it, as its processes keep it alive."""
    executor = parent_process()
    assert executor is not None
    wait_for_any([executor.sentinel])
    os.killpg(0, signal.SIGKILL)


def _change_environment(before: Mapping[str, str] | None, after: Mapping[str, str]) -> None:
    """Set the variables of an order. After an earlier one only those that differ are changed: what the tasks
    have set themselves goes with what they have loaded."""
    if before is None:
        os.environ.clear()
        before = {}
    for name in before.keys() - after.keys():
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in after.items() if before.get(name) != value})


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, or closed by a user's code
            stream.flush()


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _close_input() -> None:
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
