"""Context managers for signals that come at a bad moment."""

import contextlib
import signal
from collections.abc import Collection, Iterator
from types import FrameType

STOPPING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


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


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM end the run as Ctrl-C does: tasks stopped, lease released, W&B finished."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
