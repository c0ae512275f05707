"""Signals that come at a bad moment, and limits for child processes and calls that may hang."""

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from subprocess import DEVNULL, CompletedProcess, Popen, TimeoutExpired, run
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

Answer = TypeVar("Answer")

STOPPING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
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
    """Let SIGTERM, and others, end the block as Ctrl-C does: tasks stopped, lease released, W&B finished.
    SIGHUP stays ignored where it is, as nohup has it."""
    has_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    heard = [number for number in (signal.SIGTERM, *others) if not (has_nohup and number is signal.SIGHUP)]
    previous = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it is gone, however it ended.

    One that is gone already sends none: compare ``os.getppid`` afterwards where that can be.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def ask_program(module: str, given: str, seconds: float) -> "CompletedProcess[str]":
    """Run a module as a program that reads ``given`` on standard input. It ends with the thread that asks,
    however that ends. Raises TimeoutExpired after having killed it."""
    command, asking = [sys.executable, "-P", "-m", module], os.getpid()

    def tied() -> None:
        end_with_parent(signal.SIGKILL)
        if os.getppid() != asking:  # it has ended meanwhile
            os._exit(1)

    return run(
        command,
        input=given,
        capture_output=True,
        text=True,
        timeout=seconds,
        preexec_fn=tied,
    )


def ended_within(process: "Popen[bytes]", seconds: float) -> bool:
    """Wait for a child for a time. Returns whether it has ended."""
    with contextlib.suppress(TimeoutExpired):
        process.wait(max(0.0, seconds))
        return True
    return False


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
        return process.returncode if ended_within(process, seconds) else None
    finally:
        if process.poll() is None:
            signal_session(process.pid)
            ended_within(process, _KILL_SECONDS)


def joined_within(process: "BaseProcess", seconds: float) -> bool:
    """Wait for a child of multiprocessing that was killed. Returns whether it has ended.

    One that hangs in the kernel, as where a driver or a filesystem does, is left behind: Python
    waits for each child that it knows of, without a limit, when this process exits.
    """
    from multiprocessing import process as module

    process.join(seconds)
    if process.exitcode is None:
        module._children.discard(process)  # type: ignore[attr-defined]
    return process.exitcode is not None


@dataclass(frozen=True)
class CommandOutput:
    """What a command has said, and how it ended."""

    exit_code: int
    text: str


def said_within(command: Sequence[str], seconds: float) -> CommandOutput | None:
    """Run a command, and return what it wrote on standard output; None where it takes longer.

    Then it is killed, and left behind where it hangs in the kernel, as programs do that ask a driver which
    hangs: ``subprocess.run`` would wait for the end of such a one. Raises OSError where it cannot be started.
    """
    with tempfile.TemporaryFile() as output:
        process = Popen(command, stdin=DEVNULL, stdout=output, stderr=DEVNULL, start_new_session=True)
        if (code := wait_or_kill(process, seconds)) is None:
            return None
        output.seek(0)
        return CommandOutput(code, output.read().decode(errors="replace"))


def within(seconds: float, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
    """Return what ``ask`` returns, or ``otherwise`` where it takes longer.

    It runs in a thread that is left behind then: looking up a host's name has no limit of its own.
    """
    found = [otherwise]
    thread = threading.Thread(target=lambda: found.insert(0, ask()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0]
