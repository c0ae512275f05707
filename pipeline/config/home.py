"""The home directory in place of a ``~`` that no shell has replaced.

A shell does it for a whole word, and not for the value of ``KEY=~/data`` or ``--out=~/a.html``, nor for what
is in quotes or in a file. Here every value and every argument that begins with ``~/`` or ``~NAME/`` means
what it would mean to a shell as a word.
"""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm.errors import UserError

_OF_WORDS = frozenset({"command", "container"})
"""Keys whose text is split into words."""
_BEGINNING = re.compile(r"(?<!\S)~[\w.-]*(?=/)")
_OF_SETTING = re.compile(r"(?<=[=\[{,:( ])~[\w.-]*(?=/)")
"""A home directory where a value of a setting begins, which may be a list or a mapping."""


class NoHome(UserError, ValueError):
    """A path begins with the home directory of an unknown user."""


def with_home(text: str) -> str:
    """Return a text with a home directory in place of its beginning; of an unknown user it stays."""
    user, slash, rest = text.partition("/")
    with contextlib.suppress(RuntimeError):  # there is no such user
        return f"{Path(user).expanduser()}{slash}{rest}" if user.startswith("~") and slash else text
    return text


def with_homes(data: Any, key: str = "") -> Any:
    """Return the values of a configuration with home directories, those of commands in each of their words.

    Args:
        key: last part of the key of ``data``.
    """
    if isinstance(data, Mapping):
        return {name: with_homes(value, str(name)) for name, value in data.items()}
    if isinstance(data, list):
        return [with_homes(value) for value in data]
    if not isinstance(data, str):
        return data
    if key in _OF_WORDS:
        return _BEGINNING.sub(lambda found: _home_of(found[0]), data)
    return with_home(data)


def arguments_with_home(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with home directories: of words, of values of options, and of all
    values of settings, which Hydra takes for something else."""
    return [_argument_with_home(word) for word in words]


def _argument_with_home(word: str) -> str:
    name, sign, value = word.partition("=")
    if not sign or word.startswith("~"):
        return with_home(word)
    if word.startswith("--"):
        return f"{name}={with_home(value)}"
    return name + _OF_SETTING.sub(lambda found: _home_of(found[0]), f"={value}")


def _home_of(beginning: str) -> str:
    """Return a home directory for ``~`` or ``~NAME``; of an unknown user it stays."""
    return with_home(f"{beginning}/").removesuffix("/")


def full_path(path: str | os.PathLike[str]) -> Path:
    """Return a path as an absolute one. Raises NoHome."""
    if why := why_no_home(found := with_home(os.fspath(path))):
        raise NoHome(f"{found}: {why}")
    return Path(found).absolute()


def why_no_home(path: str) -> str:
    """Return why a path cannot be meant as it is; empty for any that does not begin with ``~``."""
    if not path.startswith("~"):
        return ""
    user = path[1:].partition("/")[0]
    what = f"no user is called {user!r}" if user else "write ~/ for your home directory"
    return f"{what}; for a folder with this name write ./{path}"
