"""One process at a time in a folder."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_REST = 0.1
"""Seconds from one try to the next."""


@contextmanager
def alone_in(folder: Path, patience: float, wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let one process at a time into the block; on a filesystem without locks, any. Nothing is written, so
    that other users may come next.

    Args:
        patience: seconds for which others that are in it are waited for.
        wait: called once where one is.

    Raises:
        TimeoutError: one was in it for longer.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        until = time.monotonic() + patience
        if not _is_taken(lock):
            wait()
            while not _is_taken(lock):
                if time.monotonic() > until:
                    raise TimeoutError(f"another process has kept {folder} locked for {patience:.0f} s")
                time.sleep(_REST)
        yield
    finally:
        os.close(lock)


def _is_taken(lock: int) -> bool:
    """Take a lock. Returns whether it is this process's, or there are none."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this filesystem has no locks
        return True
    return True
