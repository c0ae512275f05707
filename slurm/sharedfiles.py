"""Reading what other machines make, replace and move, on a filesystem whose clients remember.

A client of a network filesystem answers for some seconds from what it has seen: a file that another machine
made is missing, one that was replaced has its old content, or its handle is stale; one that was removed is
still there; a folder that was moved away is found under its old name, for as long as somebody looks into it.
A listing is always asked of the server, and what the client remembers of the names in it is renewed. So:

* whether a file is there is what the listing of its folder says (:func:`is_there`, :func:`names_in`);
* who reads a file that others replace lists its folder first (:func:`read_newest`);
* who opens a folder that others move lists the folder above it first (:func:`is_there`), and who moves one
  away makes a new one in its place, so that there is a name to be renewed;
* an answer that says that a handle is stale, or that the server cannot be asked now, is not believed at once
  (:func:`persistently`).
"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from slurm.errors import ServiceError

STALE = frozenset({errno.ESTALE})
"""Errors of an operation that was not carried out: it may be repeated, whatever it changes."""
PASSING = STALE | {errno.EIO, errno.ENOTCONN}
"""Errors that may pass. Whatever failed may have been carried out all the same."""
WAITS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Seconds between two tries. Together they are longer than clients remember by default (1 to 3 s)."""

Result = TypeVar("Result")


class FileServerError(ServiceError, OSError):
    """A file cannot be read or replaced: its server says for seconds that its handle is stale, or worse."""


def persistently(
    path: Path, act: Callable[[], Result], errors: frozenset[int] = PASSING, waits: tuple[float, ...] = WAITS
) -> Result:
    """What ``act`` returns, however often it has to be called.

    Args:
        path: what it acts upon; between two calls the client is made to look at its folder again.
        errors: numbers of the errors after which it is called again.

    Raises:
        FileServerError: one of them is still there after the last of ``waits``.
        OSError: another one, at once.
    """
    for wait in waits:
        try:
            return act()
        except OSError as error:
            if error.errno not in errors:
                raise
        time.sleep(wait)
        _renew(path.parent)
    try:
        return act()
    except OSError as error:
        if error.errno not in errors:
            raise
        reason = f"{error.strerror}, still after {len(waits) + 1} tries in {sum(waits):.0f} s"
        told = f"{reason}; look at the mount and its file server"
        raise FileServerError(error.errno, told, str(path)) from None


def names_in(folder: Path) -> set[str]:
    """Names in a folder as the file server has them; none where there is no such folder."""
    try:
        return set(_list(folder))
    except (FileNotFoundError, NotADirectoryError):
        pass
    try:
        return set(_list(folder)) if is_there(folder) else set()
    except (FileNotFoundError, NotADirectoryError):
        return set()


def is_there(path: Path) -> bool:
    """Whether something has this name, as the file server has it."""
    if path == path.parent:
        return True
    try:
        return path.name in names_in(path.parent)
    except PermissionError:  # a folder that may be entered but not listed
        return path.exists()


def read_shared(path: Path) -> bytes:
    """Content of a file that others make, and do not change.

    Raises:
        FileNotFoundError: there is none, the listing of its folder says so, too.
        OSError: see :func:`persistently`.
    """
    return persistently(path, lambda: _if_there(path, path.read_bytes))


def read_newest(path: Path) -> bytes:
    """Content of a file that others replace or append to, as it is now. Raises as :func:`read_shared`."""
    _renew(path.parent)
    return read_shared(path)


def size_of(path: Path) -> int:
    """Size in bytes. Raises as :func:`read_shared`."""
    return persistently(path, lambda: _if_there(path, path.stat)).st_size


def _if_there(path: Path, act: Callable[[], Result]) -> Result:
    """Raises OSError (stale) where the client says that there is no such file, and the server has one."""
    try:
        return act()
    except FileNotFoundError:
        if not is_there(path):
            raise
    try:
        return act()  # what the listing showed is known now
    except FileNotFoundError as error:
        raise OSError(errno.ESTALE, "listed, but not found", str(path)) from error


def make_folder(path: Path) -> None:
    """Make a folder where there is none, with those above it.

    Raises:
        OSError: it cannot be made, or for some seconds the client says that it is there, and the server that
            it is not.
    """

    def make() -> None:
        path.mkdir(parents=True, exist_ok=True)
        if not is_there(path):
            raise OSError(errno.ESTALE, "the folder was moved away", str(path))

    persistently(path, make)


def _list(folder: Path) -> list[str]:
    return persistently(folder, lambda: os.listdir(folder))  # noqa: PTH208  names are all that is needed


def _renew(folder: Path) -> None:
    """Have the client ask the server for the names in a folder."""
    try:
        os.listdir(folder)  # noqa: PTH208
    except OSError:
        # The folder itself may be what is stale. What it cannot say, the operation that follows will.
        if folder != folder.parent:
            _renew(folder.parent)
