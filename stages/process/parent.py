"""A task notifies its parent process that it has committed, while it goes on."""

import contextlib
import os
from collections.abc import Callable

from pipeline.run.environment import PARENT_PIPE, RELEASED

_listener: Callable[[], None] | None = None
_on_release: Callable[[], None] | None = None


def hear_of_policy(act: Callable[[], None]) -> None:
    """Have a function called once the next policy is committed, before the state behind it is written: who
    reads the policy need not wait for that."""
    global _listener
    _listener = act


def hear_of_release(act: Callable[[], None]) -> None:
    """Have a function called when a task has given its devices back, and only writes files."""
    global _on_release
    _on_release = act


def policy_is_there() -> None:
    """Call what :func:`hear_of_policy` was given, once."""
    global _listener
    act, _listener = _listener, None
    if act is not None:
        act()


def notify_parent(what: bytes) -> None:
    """Write one byte to the file descriptor that the environment names; without one, do nothing.

    Args:
        what: COMMITTED, as soon as others may read the task's result; RELEASED, once its devices are free
            too.
    """
    if what == RELEASED and _on_release is not None:
        _on_release()
    number = os.environ.get(PARENT_PIPE, "")
    if number:
        with contextlib.suppress(OSError):  # no listener any more; waiting processes also poll
            os.write(int(number), what)
