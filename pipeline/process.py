"""Signals that come at a bad moment, and limits for child processes and calls that may hang."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from subprocess import Popen, TimeoutExpired
from types import FrameType
from typing import TypeVar

Answer = TypeVar("Answer")

STOPPING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_KILL_SECONDS = 1.0
"""Seconds to wait for a process that was killed; one that hangs in the kernel is left behind."""


@contextlib.contextmanager
def uninterrupted(numbers: Collection[signal.Signals] = STOPPING) -> Iterator[None]:
    """Block Ctrl-C and similar signals until the block is done, which takes seconds at most.

    Threads and processes that are started in it inherit the mask: they never get these signals, unless they
    unblock them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal as Ctrl-C."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible(*others: signal.Signals) -> Iterator[None]:
    """Let SIGTERM, and others, end the block as Ctrl-C does: tasks stopped, lease released, W&B finished."""
    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, *others)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def signal_session(leader: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal every process of a session that a child of ours has begun, even if the child has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def wait_or_kill(process: "Popen[bytes]", seconds: float) -> int | None:
    """Wait for a child that was started with ``start_new_session``, and return its exit code.

    One that takes longer is killed with its session, which gives None; so it is when the wait is interrupted.
    What a child that ended in time has left behind goes on.
    """
    try:
        return process.wait(seconds)
    except TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            signal_session(process.pid)
            with contextlib.suppress(TimeoutExpired):
                process.wait(_KILL_SECONDS)


def within(seconds: float, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
    """Return what ``ask`` returns, or ``otherwise`` where it takes longer.

    It runs in a thread that is left behind then: looking up a host's name has no limit of its own.
    """
    found = [otherwise]
    thread = threading.Thread(target=lambda: found.insert(0, ask()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0]
