"""A program of the user's in a task: run under limits, its numbers read without trusting it."""

import ctypes
import json
import math
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.text import exit_in_words, printable, size

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 3.0
"""Seconds that a program that is stopped may take to end by itself."""
_KILL_SECONDS = 5.0
_MOST_BYTES = 1 << 20
_MOST_NUMBERS = 2000
_LONGEST_SHOWN = 80
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,@:=+/-]{0,119}")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class ProgramFailed(Exception):
    """A program gave no numbers; says why. It may be tried again."""

    is_explained = True
    """Whether the message says all: where it was raised is of no interest."""


def run_program(
    words: Sequence[str], folder: Path, seconds: float, should_stop: Callable[[], bool] = lambda: False
) -> None:
    """Run a program in a session of its own, its output going where this process's goes, and wait for it.

    It is stopped with all that it has started when it takes too long or this task is to stop, and it dies
    with this process.

    Raises:
        ProgramFailed: it could not be started, failed, or was stopped.
    """
    try:
        process = subprocess.Popen(
            words, cwd=folder, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ProgramFailed(f"{words[0]} cannot be started: {error}") from None
    until = time.monotonic() + seconds
    why = ""
    try:
        while not why and process.poll() is None:
            if should_stop():
                why = f"{words[0]} was stopped, as its task was warned that it will be ended"
            elif (left := until - time.monotonic()) <= 0:
                why = f"{words[0]} was stopped after {seconds:g} s (evaluate.command_seconds)"
            else:
                _wait(process, min(left, _POLL_SECONDS))
    finally:
        _end_session(process)
    if why:
        raise ProgramFailed(why)
    if process.returncode:
        was = "was " if process.returncode < 0 else ""
        raise ProgramFailed(f"{words[0]} {was}{exit_in_words(process.returncode)}; its log has what it said")


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for a process for a time. Returns whether it has ended."""
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        return False


def _end_session(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of the program's session: gently while it lives itself, then what it left behind."""
    if process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        _wait(process, _GRACE_SECONDS)
    _signal(process.pid, signal.SIGKILL)
    _wait(process, _KILL_SECONDS)  # one that hangs in the kernel is left behind


def _signal(leader: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        return


def read_numbers(path: Path) -> dict[str, float]:
    """Read the numbers that a program has written: a JSON object of finite numbers by name.

    Raises:
        ProgramFailed: it is anything else; says what.
    """
    found = parse_numbers(_content(path))
    if not found:
        raise ProgramFailed("it wrote no number, but an empty object")
    return found


def _content(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ProgramFailed("{output} is no file")
        if status.st_size > _MOST_BYTES:
            raise ProgramFailed(
                f"it wrote {size(status.st_size)}, and numbers take {size(_MOST_BYTES)} at most"
            )
        return path.read_bytes()
    except FileNotFoundError:
        raise ProgramFailed("it ended well but did not write {output}") from None


def parse_numbers(content: bytes) -> dict[str, float]:
    """Parse a JSON object of finite numbers. Pure. Raises ProgramFailed as :func:`read_numbers`."""
    try:
        said = json.loads(content)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ProgramFailed(f"what it wrote is no JSON: {_shown(why)}") from None
    if not isinstance(said, dict):
        raise ProgramFailed(f"it wrote {_kind(said)} instead of an object of numbers")
    if len(said) > _MOST_NUMBERS:
        raise ProgramFailed(f"it wrote {len(said)} numbers; {_MOST_NUMBERS} at most are taken")
    return {_checked_name(name): _finite(name, value) for name, value in said.items()}


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        wanted = "letters, digits and _.,@:=+/- , at most 120"
        raise ProgramFailed(f"{_shown(repr(name))} is no name of a number: write {wanted}")
    return name


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProgramFailed(f"{name} is {_kind(value)} instead of a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ProgramFailed(f"{name} is {_shown(str(value)[:_LONGEST_SHOWN])}, which is not finite")
    return number


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(text: str) -> str:
    cut = printable(text)
    return cut if len(cut) <= _LONGEST_SHOWN else f"{cut[:_LONGEST_SHOWN]}..."
