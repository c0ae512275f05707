"""A process between a task and a program of the user's, which ends the program with all that it has started:
when the task says so, when the task is gone, however it went, and when the program itself has ended.

What the program leaves without a parent becomes a child of this process, whatever session it is in, so that
nothing is lost sight of. Started as a file of its own, ``supervisor.py TASK ENDING GRACE WORD...``, where
ENDING is a file descriptor, it imports nothing but the standard library.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STOP, _KILL = signal.SIGTERM, signal.SIGALRM
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
"""Signals that all processes of a job may get: what follows from them is the task's affair."""
_HANDLED = (_STOP, _KILL, *_WARNINGS)
_KILL_SECONDS = 5.0
_LOOK_SECONDS = 0.005


def supervise(task: int, grace: float, words: Sequence[str]) -> dict[str, object] | None:
    """Run a program to its end. Returns how it ended: ``code``, or the ``error`` that kept it from starting;
    None where the task is gone already.

    SIGTERM stops it, gently at first if the task lives.

    Args:
        task: process id of the task, which has started this process.
        grace: seconds that the program may take to end by itself when it is stopped.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else nothing can be waited for
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    if os.getppid() != task:
        return None

    def become_program() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        program = subprocess.Popen(words, start_new_session=True, preexec_fn=become_program)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"error": str(error)}

    def handle(number: int, frame: FrameType | None) -> None:
        if number == _KILL or (number == _STOP and os.getppid() != task):
            kill_descendants()
        elif number == _STOP and signal.getitimer(signal.ITIMER_REAL)[0] == 0.0:
            signal.setitimer(signal.ITIMER_REAL, grace)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(program.pid, signal.SIGTERM)

    for number in _HANDLED:
        signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    program.returncode = wait_for(program.pid)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    end_descendants()
    return {"code": program.returncode}


def wait_for(program: int) -> int:
    """Wait for the program, and for whatever it leaves behind meanwhile. Returns its exit code, or minus the
    signal that ended it."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == program:
            return os.waitstatus_to_exitcode(status)


def end_descendants() -> None:
    """Kill what is left, until there is nothing. What hangs in the kernel is left behind."""
    until = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < until:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        kill_descendants()
        time.sleep(_LOOK_SECONDS)


def kill_descendants() -> None:
    for process in list(descendants()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def descendants() -> Iterator[int]:
    """Yield the ids of all processes below this one, parents first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(folder.name))
    found = [os.getpid()]
    for process in found:
        yield from (own := children.get(process, []))
        found += own


if __name__ == "__main__":
    task, ending, grace, *words = sys.argv[1:]
    said = supervise(int(task), float(grace), words)
    if said is not None:
        os.write(int(ending), json.dumps(said).encode())
