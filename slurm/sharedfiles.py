"""Reading files that other machines make, replace and move, on a network filesystem with client caches.

A client of a network filesystem answers for some seconds from its cache: a file that another machine
made is missing, one that was replaced has its old content, or its handle is stale; one that was removed is
still there; a folder that was moved away is found under its old name, for as long as it is in use.
A listing always comes from the server, and renews what the client caches of the names in it. So:

* a file exists if the listing of its folder has it (:func:`is_there`, :func:`names_in`);
* a reader of a file that others replace lists its folder first (:func:`read_newest`);
* a reader of a folder that others move lists the folder above it first (:func:`is_there`), and moving one
  away makes a new one in its place, so that there is a name to be renewed;
* an error that says that a handle is stale, or the server not reachable, leads to retries
  (:func:`persistently`).
"""

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from slurm.errors import ServiceError, UserError

STALE = frozenset({errno.ESTALE})
"""Errors of an operation that was not carried out: it may be repeated, whatever it changes."""
PASSING = STALE | {errno.EIO, errno.ENOTCONN}
"""Errors that may pass. Whatever failed may have been carried out all the same."""
WAITS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""Seconds between tries. Their sum is more than twice as long as clients cache by default (1 to 3 s): what
the kernel remembers may come from a cache of the client that is as old."""

_PIECE = 1 << 16
"""Bytes that are read at once at least."""
_MOST = 1 << 30
"""Bytes that a file that is read whole may have: rows of a hundred thousand iterations have a third."""

Result = TypeVar("Result")


class FileServerError(ServiceError, OSError):
    """Failure to read or replace a file: for seconds its server reported a stale handle, or worse."""


class NotAFile(UserError, OSError, ValueError):
    """Something that cannot be read whole lies where a file belongs: a folder, a pipe, or gigabytes. As a
    ValueError it is one of the ways in which a file is spoilt."""


def persistently(
    path: Path, act: Callable[[], Result], errors: frozenset[int] = PASSING, waits: tuple[float, ...] = WAITS
) -> Result:
    """Call ``act``, again after errors that may pass, and return its result.

    Args:
        path: path that it acts upon; between two calls the client's cache of its folder is renewed.
        errors: numbers of the errors after which it is called again.
        waits: seconds before each further call.

    Raises:
        FileServerError: one of ``errors`` is still raised after the last of ``waits``.
        OSError: any other error, at once.
    """
    for wait in (*waits, None):
        try:
            return act()
        except OSError as error:
            if error.errno not in errors:
                raise
            if wait is None:
                reason = f"{error.strerror}, still after {len(waits) + 1} tries in {sum(waits):.0f} s"
                told = f"{reason}; look at the mount and its file server"
                raise FileServerError(error.errno, told, str(path)) from None
        time.sleep(wait)
        _renew(path.parent)
    raise AssertionError("unreachable")


def names_in(folder: Path) -> set[str]:
    """List the names in a folder as the file server has them; none where there is no such folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return set(_list(folder))
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return set(_list(folder)) if is_there(folder) else set()
    return set()


def is_there(path: Path) -> bool:
    """Whether this path exists on the file server, whatever the client has cached."""
    if path == path.parent:
        return True
    try:
        return path.name in names_in(path.parent)
    except PermissionError:  # a folder that may be entered but not listed
        return path.exists()


def is_special(path: Path) -> bool:
    """Whether a pipe, a socket or a device lies there, which who opens it may wait for without end."""
    return path.exists() and not (path.is_file() or path.is_dir())


def read_shared(path: Path) -> bytes:
    """Read a file that others make, and do not change.

    Raises:
        FileNotFoundError: there is none, by the listing of its folder, too.
        NotAFile: something else lies there.
        OSError: see :func:`persistently`.
    """
    return persistently(path, lambda: _if_there(path, lambda: read_plainly(path)))


def read_plainly(path: str | Path, folder: int | None = None) -> bytes:
    """Return a file's content, with as few calls as it takes: on a network filesystem each may be a message.
    Python's files ask also whether they are terminals, and where they begin.

    Args:
        folder: descriptor of an open folder that ``path`` is relative to.

    Raises:
        NotAFile: something else lies there. A pipe is not waited for.
    """
    descriptor = _opened(path, folder)
    try:
        if (num_bytes := os.fstat(descriptor).st_size) > _MOST:
            raise NotAFile(f"{path} has {num_bytes / 2**30:.1f} GiB, where a small file belongs")
        pieces = []
        while piece := os.read(descriptor, max(_PIECE, num_bytes)):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(descriptor)


def opened_file(path: Path) -> FileIO:
    """Open a file to read from, unbuffered. Raises NotAFile, as :func:`read_plainly`."""
    return FileIO(_opened(path))


def _opened(path: str | Path, folder: int | None = None) -> int:
    """Return a descriptor of a file. Raises NotAFile where something else lies there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or device"
    raise NotAFile(f"{path} is {kind}, where a file belongs; move it away")


def write_plainly(
    path: str | Path, content: bytes, folder: int | None = None, *, is_new: bool = False
) -> None:
    """Write a file, with as few calls as it takes.

    Args:
        folder: as for :func:`read_plainly`.
        is_new: whether there must be none before, and it is flushed to the disk.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if is_new else os.O_TRUNC)
    descriptor = os.open(path, flags, 0o666, dir_fd=folder)
    try:
        view = memoryview(content)
        while view:  # a full disk takes a part, and refuses the rest
            view = view[os.write(descriptor, view) :]
        if is_new:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_newest(path: Path) -> bytes:
    """Read a file that others replace or append to, as it is now. Raises as :func:`read_shared`."""
    _renew(path.parent)
    return read_shared(path)


def size_of(path: Path) -> int:
    """Return a file's size in bytes. Raises as :func:`read_shared`."""
    return persistently(path, lambda: _if_there(path, path.stat)).st_size


def _if_there(path: Path, act: Callable[[], Result]) -> Result:
    """Call ``act``. Raises OSError (stale) where the client finds no such file, and the server has one."""
    try:
        return act()
    except FileNotFoundError:
        if not is_there(path):
            raise
    try:
        return act()  # what the listing showed is known now
    except FileNotFoundError as error:
        if path.is_symlink():  # it leads to nothing
            raise
        raise OSError(errno.ESTALE, "listed, but not found", str(path)) from error


class FolderGone(UserError, FileNotFoundError):
    """A folder is not there any more in which something was to be made: it was moved or removed."""


def make_folder(path: Path, below: Path | None = None) -> None:
    """Make a folder where there is none, with those above it.

    Args:
        below: a folder above it that must be there: nothing is made in the place of one that was moved away.

    Raises:
        FolderGone: ``below`` is not there.
        OSError: it cannot be made, or for some seconds it exists for the client and not for the server.
    """

    def make() -> None:
        if below is None or not path.is_relative_to(below):
            path.mkdir(parents=True, exist_ok=True)
        else:
            _make_below(below, path)
        if not is_there(path):
            raise OSError(errno.ESTALE, "the folder was moved away", str(path))

    persistently(path, make)


def _make_below(below: Path, path: Path) -> None:
    folder = below
    try:
        for part in path.relative_to(below).parts:
            folder /= part
            folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        raise FolderGone(f"{below} is not there any more: moved or removed?") from None


def _list(folder: Path) -> list[str]:
    return persistently(folder, lambda: os.listdir(folder))  # noqa: PTH208  names are all that is needed


def _renew(folder: Path) -> None:
    """Make the client ask the server for the names in a folder."""
    try:
        os.listdir(folder)  # noqa: PTH208
    except OSError:
        # The folder itself may be stale. Any other error shows in the operation that follows.
        if folder != folder.parent:
            _renew(folder.parent)


# --- JSON with a checksum --------------------------------------------------------------------------------

# So that a flipped bit in a file is found when it is read. Here and not in pipeline/, because slurm.element
# reads such a file.


def sealed(content: Mapping[str, Any]) -> str:
    """Return a JSON object with a checksum over its values, as text of one line."""
    return json.dumps({**content, "checksum": checksum(content)}) + "\n"


def from_json(data: bytes | str) -> Any:
    """Parse JSON. Raises ValueError where it is none, also where it is nested too deeply for any of ours."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unsealed(data: bytes) -> dict[str, Any]:
    """Undo :func:`sealed`.

    Raises:
        ValueError: it is truncated or corrupt.
    """
    content = from_json(data)
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    if content.pop("checksum", None) != checksum(content):
        raise ValueError("its content does not have the checksum that it was written with")
    return content


def checksum(content: Mapping[str, Any]) -> str:
    """Compute a checksum over the values, not the text: the file's layout may change, its content may not."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
