"""Files that are there whole or not at all, whatever happens to their writer or to the power."""

import contextlib
import errno
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import xxhash

from slurm.sharedfiles import PASSING as PASSING
from slurm.sharedfiles import STALE, NotAFile, read_plainly, write_plainly

# PASSING, is_there, make_folder, names_in, persistently and read_shared are re-exported for stages, which
# know nothing of Slurm
from slurm.sharedfiles import from_json as from_json
from slurm.sharedfiles import is_there as is_there
from slurm.sharedfiles import make_folder as make_folder
from slurm.sharedfiles import names_in as names_in
from slurm.sharedfiles import opened_file as opened_file
from slurm.sharedfiles import persistently as persistently
from slurm.sharedfiles import read_shared as read_shared

_PIECE = 1 << 18
"""Bytes that are read and hashed at once, so few that the processor's cache still has them."""


def digest_file(path: Path) -> tuple[int, str]:
    """Return size and xxh3_128 of a file as it is on disk."""

    def digest() -> tuple[int, str]:
        with opened_file(path) as file:
            return hash_stream(file)

    return persistently(path, digest)


def hash_stream(source: IO[bytes], target: IO[bytes] | None = None) -> tuple[int, str]:
    """Return size and xxh3_128 of the rest of ``source``, which is copied to ``target`` on the way."""
    digest, size = xxhash.xxh3_128(), 0
    while chunk := source.read(_PIECE):
        digest.update(chunk)
        size += len(chunk)
        if target is not None:
            target.write(chunk)
    return size, digest.hexdigest()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def flush(file: IO[bytes]) -> None:
    """Flush an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = persistently(path, lambda: os.open(path, os.O_RDONLY))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put ``path`` into the block's OSErrors: those of writing and flushing do not name a file."""
    try:
        yield
    except NotAFile as error:  # of a name in a folder
        said = str(error)
        raise NotAFile(said if str(path) in said else said.replace(path.name, str(path), 1)) from None
    except OSError as error:
        if not str(error.filename or "").startswith("/"):
            error.filename = str(path)
        raise


@contextlib.contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of a folder: what is written through it follows the folder wherever it is moved."""
    folder = persistently(path, lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY))
    try:
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def private_file(folder: int, name: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield a private name beside ``name`` in an open folder, and a new file there. The name is removed at
    the end, unless the block has renamed it.
    """
    with _private_name(folder, name) as private:
        descriptor = os.open(private, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
        with os.fdopen(descriptor, "w+b") as file:
            yield private, file


@contextlib.contextmanager
def _private_name(folder: int, name: str) -> Iterator[str]:
    private = f".{name}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        yield private
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(private, dir_fd=folder)


@contextlib.contextmanager
def _private_copy(folder: int, name: str, text: bytes) -> Iterator[str]:
    """Yield a private name, as :func:`private_file`, of a file that holds ``text``, flushed."""
    with _private_name(folder, name) as private:
        write_plainly(private, text, folder, is_new=True)
        yield private


def replace_durably(path: Path, text: str) -> None:
    """Put ``text`` at ``path`` in one step: readers see the old file or the new one, never a part."""
    with naming(path), opened_folder(path.parent) as folder:
        with _private_copy(folder, path.name, text.encode()) as private:
            # Another machine may have replaced the file already, which this one does not know yet.
            put = functools.partial(os.replace, private, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            persistently(path, put, STALE)
        os.fsync(folder)


def link_once(path: Path, text: str) -> bool:
    """Publish ``text`` at ``path`` unless something is there. True if we did, false if another was first."""
    with naming(path), opened_folder(path.parent) as folder:
        return link_once_in(folder, path.name, text)


def link_once_in(folder: int, name: str, text: str) -> bool:
    """Publish ``text`` as :func:`link_once`, under ``name`` in an open folder, wherever that is by now."""
    content = text.encode()
    with _private_copy(folder, name, content) as private:
        publish = functools.partial(_link_or_lose, folder, private, name, content)
        if not persistently(_path_of(folder) / name, publish, STALE):
            return False
    os.fsync(folder)
    return True


def _link_or_lose(folder: int, private: str, name: str, content: bytes) -> bool:
    """Whether ``private`` got the name; false if another file has it. Raises OSError (stale) if none has."""
    try:
        os.link(private, name, src_dir_fd=folder, dst_dir_fd=folder)
        return True
    except FileExistsError:
        # The client may only remember a file that another machine removed: the listing decides.
        if name not in os.listdir(folder):
            raise OSError(errno.ESTALE, "the name is taken, and there is no such file", name) from None
    # Over a network the reply to a successful link can be lost and its repetition fail: check who won.
    # By content, since the number of links may come from the client's cache.
    return read_in(folder, name) == content


def _path_of(folder: int) -> Path:
    return Path(f"/proc/self/fd/{folder}").readlink()


def read_in(folder: int, name: str) -> bytes | None:
    """Return the content of a file in an open folder as it is now, or None where there is none."""
    if name not in os.listdir(folder):
        return None

    try:
        return persistently(_path_of(folder) / name, lambda: read_plainly(name, folder))
    except FileNotFoundError:
        return None


def file_state(path: Path) -> str:
    """Return a user's file's hash, size and modification time as text that :func:`is_unchanged` compares."""
    status = persistently(path, path.stat)
    return f"{digest_file(path)[1]}:{status.st_size}:{status.st_mtime_ns}"


def is_unchanged(path: Path, recorded: str) -> bool:
    """Whether a file still is as :func:`file_state` recorded it; hashed only if its size or time differ."""
    digest, size, modified = recorded.split(":")
    if not is_there(path):
        return False
    status = persistently(path, path.stat)
    if (str(status.st_size), str(status.st_mtime_ns)) == (size, modified):
        return True
    return digest_file(path)[1] == digest
