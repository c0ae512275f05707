"""Folders of a process in the node's temporary folder: where it is killed, the next one removes them."""

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

_LOCK, _UNLOCKED = ".lock", ".unlocked"
_locks: dict[Path, int] = {}
"""Descriptors of the files that keep this process's folders locked, by folder."""


def make_node_folder(prefix: str) -> Path:
    """Make a folder whose name begins with ``prefix``, which has nothing but hidden files in it. The caller
    removes it (:func:`remove_node_folder`); those of processes that were killed are removed first."""
    remove_abandoned(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        lock_node_folder(folder)
    except BaseException:
        remove_node_folder(folder)
        raise
    return folder


def remove_node_folder(folder: Path) -> None:
    """Remove a folder that this process has made. Errors are ignored."""
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


def lock_node_folder(folder: Path) -> None:
    """Lock a folder for as long as this process lives, however it ends. Where the file system has no locks,
    no other process will remove it."""
    lock = os.open(folder / _UNLOCKED, os.O_CREAT | os.O_RDWR, 0o600)
    _locks[folder] = lock
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, socket.gethostname().encode())
        (folder / _UNLOCKED).rename(folder / _LOCK)  # so that it is not found before it is locked


def remove_abandoned(prefix: str) -> None:
    """Remove folders of this user's processes that have ended on this node without removing them."""
    for lock in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as file:  # OSError: another's, in use, or gone
            is_own = os.fstat(file.fileno()).st_uid == os.getuid()
            if not is_own or file.read() != socket.gethostname().encode():
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in lock.parent.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path != lock:
                    path.unlink()
            shutil.rmtree(lock.parent)  # with the lock, last, so that a sweep that is killed is made good
