"""A program of the user's in a task: run under limits, its numbers read without trusting it."""

import json
import math
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.text import exit_in_words, printable, size

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 3.0
"""Seconds that a program that is stopped may take to end by itself."""
_KILL_SECONDS = 10.0
"""Seconds after that in which what it has started is killed."""
_MOST_BYTES = 1 << 20
_MOST_NUMBERS = 2000
_LONGEST_SHOWN = 80
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,@:=+/-]{0,119}")
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


class ProgramFailed(Exception):
    """A program gave no numbers; says why. It may be tried again."""

    is_explained = True
    """Whether the message says all: where it was raised is of no interest."""


def run_program(
    words: Sequence[str], folder: Path, seconds: float, should_stop: Callable[[], bool] = lambda: False
) -> None:
    """Run a program in a session of its own, its output going where this process's goes, and wait for it.

    It is stopped when it takes too long or this task is to stop, and it dies with this process; and with it
    in each case, as when it ends by itself, all that it has started (:mod:`stages.evaluation.supervisor`).

    Raises:
        ProgramFailed: it could not be started, failed, or was stopped.
    """
    with tempfile.TemporaryFile() as ending:
        process = _start(words, folder, ending.fileno())
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
            _end(process)
        ending.seek(0)
        said = json.loads(ending.read() or "{}")
    if why:
        raise ProgramFailed(why)
    if "error" in said:
        raise ProgramFailed(f"{words[0]} cannot be started: {said['error']}")
    if code := said.get("code", process.returncode):
        was = "was " if code < 0 else ""
        raise ProgramFailed(f"{words[0]} {was}{exit_in_words(code)}; its log has what it said")


def _start(words: Sequence[str], folder: Path, ending: int) -> "subprocess.Popen[bytes]":
    """Start the program's supervisor, which writes to a file how the program ended. Raises ProgramFailed."""
    given = (str(os.getpid()), str(ending), str(_GRACE_SECONDS))
    command = [sys.executable, "-I", "-S", str(_SUPERVISOR), *given, *words]
    try:
        return subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[ending]
        )
    except (OSError, ValueError) as error:
        raise ProgramFailed(f"{words[0]} cannot be started: {error}") from None


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for a process for a time. Returns whether it has ended."""
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Let the supervisor end the program, gently at first, and all that it has started."""
    if process.poll() is None:
        process.terminate()
        if not _wait(process, _GRACE_SECONDS + _KILL_SECONDS):
            process.kill()  # what hangs in the kernel is left behind
            _wait(process, _POLL_SECONDS)


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
        said = json.loads(content, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ProgramFailed(f"what it wrote is no JSON: {_shown(why)}") from None
    if not isinstance(said, dict):
        raise ProgramFailed(f"it wrote {_kind(said)} instead of an object of numbers")
    if len(said) > _MOST_NUMBERS:
        raise ProgramFailed(f"it wrote {len(said)} numbers; {_MOST_NUMBERS} at most are taken")
    return {_checked_name(name): _finite(name, value) for name, value in said.items()}


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object. Raises ProgramFailed where a name occurs twice: which number counts is not said."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ProgramFailed(f"it wrote {_shown(repr(name))} twice; write each name once")
        found[name] = value
    return found


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
