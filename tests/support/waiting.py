"""Waiting for a condition."""

import time
from collections.abc import Callable
from typing import TypeVar

_Any = TypeVar("_Any")


def eventually(holds: Callable[[], object], seconds: float = 10) -> bool:
    """Whether it holds within some seconds."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def wait_for(look: Callable[[], _Any], what: str, seconds: float = 120) -> _Any:
    """Return what is found as soon as there is something. Raises AssertionError when the time is up."""
    until = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < until, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)
    return found
