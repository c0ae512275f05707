"""Processes of plug-ins, as forks of a command that is itself a fork (:mod:`tests.support.warm`).

Each is a new interpreter otherwise, which spends 0.7 s of CPU on imports before the plug-in's own. A command
of a test has no threads that hold locks, and imports no plug-in, so that a fork of it is as good.
"""

import atexit
import os
import re
import signal
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import spawn

_PROGRAM = re.compile(
    r"from multiprocessing\.spawn import spawn_main; spawn_main\(tracker_fd=(\d+), pipe_handle=(\d+)\)"
)
"""What the interpreter runs that :mod:`multiprocessing` starts for a process of the context "spawn"."""
SEED = {"PYTHONHASHSEED": "0"}
"""What :mod:`pipeline.plugins.sandbox` sets for them; a fork has the seed of the first interpreter."""


def is_of_plugin(arguments: Sequence[str]) -> bool:
    return len(arguments) > 1 and _PROGRAM.fullmatch(arguments[-2]) is not None


def fork_plugin(
    arguments: Sequence[str], descriptors: Sequence[int], end_with: Callable[[Callable[[], None]], None]
) -> int:
    """Fork a process that does what the interpreter would do that is asked for. Returns its process id.

    Args:
        descriptors: those that it keeps, besides the standard ones.
        end_with: carries a function out and ends the process.
    """
    asked = _PROGRAM.fullmatch(arguments[-2])
    assert asked
    # One stopped before it has forgotten the command's handlers would print that it ignores the signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    try:
        forget_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        forget_endings()
        keep_only({0, 1, 2, *descriptors})
        sys.unraisablehook = sys.__unraisablehook__
        sys.argv = ["-c", arguments[-1]]
        end_with(lambda: spawn.spawn_main(tracker_fd=int(asked[1]), pipe_handle=int(asked[2])))
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(1)  # never go on with the command


def forget_endings() -> None:
    """Leave to the command what it does when it ends, as the removal of its temporary folders."""
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]


def forget_signals() -> None:
    """Have those handled that are not ignored as when an interpreter starts."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def keep_only(descriptors: set[int]) -> None:
    """Close all others, as an interpreter that is started finds them."""
    low = -1
    for high in [*sorted(descriptors), os.sysconf("SC_OPEN_MAX")]:
        if low + 1 < high:  # of an empty range it closes others
            os.closerange(low + 1, high)
        low = high
