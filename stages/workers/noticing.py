"""Changes of folders on a local filesystem, as Linux tells of them (inotify): who waits for a file need not
look for it again and again, beside others that compute on the same cores.

On a network filesystem only this machine's own changes are reported.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_CREATED = 0x00000100 | 0x00000080
"""IN_CREATE and IN_MOVED_TO: names that are new in a folder."""
_BYTES = 1 << 16


class FolderEvents:
    """What is new in some folders. Where the system tells nothing of it, :meth:`watch` says so."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._descriptor = self._open()
        self._watched: dict[Path, int] = {}

    def _open(self) -> int | None:
        """Return an inotify instance; None where there is none, or this user has too many."""
        with contextlib.suppress(AttributeError):
            descriptor: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            return descriptor if descriptor >= 0 else None
        return None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What to wait for with select: readable when something is new."""
        return () if self._descriptor is None else (self._descriptor,)

    def watch(self, folders: Iterable[Path]) -> bool:
        """Watch these folders, and no others; of one that is not there the one above it. Returns whether it
        is notified of what is new in them from now on: in a folder that comes after it is watched, too.

        What is watched no more is reported once.
        """
        wanted = {folder if folder.is_dir() else folder.parent for folder in folders}
        for folder in self._watched.keys() - wanted:
            self._libc.inotify_rm_watch(self._descriptor, self._watched.pop(folder))
        return all(self._add(folder) for folder in wanted)

    def _add(self, folder: Path) -> bool:
        if self._descriptor is None:
            return False
        watch = self._libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _CREATED)
        before = self._watched.pop(folder, watch)
        if before != watch:  # another folder had this name
            self._libc.inotify_rm_watch(self._descriptor, before)
        if watch >= 0:
            self._watched[folder] = watch
        return bool(watch >= 0)

    def forget(self) -> None:
        """Take what was reported as read."""
        if self._descriptor is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._descriptor, _BYTES)
