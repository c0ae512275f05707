"""Waiting for a condition."""

import time
from collections.abc import Callable


def eventually(holds: Callable[[], object], seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
