"""What callers in Python give, checked where it comes in: of a wrong type a line says what is wanted."""

import operator
import os
import reprlib
from pathlib import Path

from pipeline.config.home import full_path
from pipeline.run.identity import RunError


def given_path(name: str, value: object) -> Path:
    """Return a path as an absolute one. Raises RunError for something else, NoHome for an unknown user's."""
    if isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str):
        return full_path(path)
    raise _wrong(name, value, "a path, as text or pathlib.Path")


def given_number(name: str, value: object) -> int:
    """Return a whole number, also of numpy. Raises RunError for anything else."""
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        return operator.index(value)
    raise _wrong(name, value, "a whole number")


def given_text(name: str, value: object) -> str:
    """Return a text. Raises RunError for anything else."""
    if isinstance(value, str):
        return value
    raise _wrong(name, value, "a text")


def _wrong(name: str, value: object, wanted: str) -> RunError:
    return RunError(f"{name}={reprlib.repr(value)} is of type {type(value).__name__}; give {wanted}")
