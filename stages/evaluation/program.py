"""A program of the user's in a task: run under limits, its numbers read without trusting it."""

import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from pipeline.process import ended_within
from pipeline.text import exit_in_words, printable, size

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 3.0
"""Seconds that a program that is stopped may take to end by itself."""
_KILL_SECONDS = 10.0
"""Seconds after that in which what it has started is killed."""
_MOST_BYTES = 1 << 20
_LONGEST_SHOWN = 80
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,@:=+/-]{0,119}$")]
_NUMBERS = TypeAdapter(Annotated[dict[_Name, FiniteFloat], Field(min_length=1, max_length=2000)])
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
                    ended_within(process, min(left, _POLL_SECONDS))
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


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Let the supervisor end the program, gently at first, and all that it has started."""
    if process.poll() is None:
        process.terminate()
        if not ended_within(process, _GRACE_SECONDS + _KILL_SECONDS):
            process.kill()  # what hangs in the kernel is left behind
            ended_within(process, _POLL_SECONDS)


def read_numbers(path: Path) -> dict[str, float]:
    """Read the numbers that a program has written: a JSON object of finite numbers by name.

    Raises:
        ProgramFailed: it is anything else; says what.
    """
    return parse_numbers(_content(path))


def _content(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ProgramFailed("{output} is not a file")
        if status.st_size > _MOST_BYTES:
            raise ProgramFailed(
                f"it wrote {size(status.st_size)}, and numbers take {size(_MOST_BYTES)} at most"
            )
        return path.read_bytes()
    except FileNotFoundError:
        raise ProgramFailed("it ended well but did not write {output}") from None


def parse_numbers(content: bytes) -> dict[str, float]:
    """Parse a JSON object of finite numbers; of a name that occurs twice the last counts. Pure. Raises
    ProgramFailed as :func:`read_numbers`."""
    try:
        return _NUMBERS.validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = f"{_shown(repr(first['loc'][0]))}: " if first["loc"] else ""
        raise ProgramFailed(f"what it wrote is not an object of numbers: {where}{first['msg']}") from None


def _shown(text: str) -> str:
    cut = printable(text)
    return cut if len(cut) <= _LONGEST_SHOWN else f"{cut[:_LONGEST_SHOWN]}..."
