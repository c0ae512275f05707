"""Signals that come at a bad moment."""

import contextlib
import signal
from collections.abc import Collection, Iterator

STOPPING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


@contextlib.contextmanager
def uninterrupted(numbers: Collection[signal.Signals] = STOPPING) -> Iterator[None]:
    """Let Ctrl-C and its like wait until the block is done: it takes seconds at most.

    Threads and processes that are started in the block never hear of them, unless they ask to.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
