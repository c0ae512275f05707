"""The user's code that a process has imported, to see when a new process would import other code."""

import itertools
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

Files = Mapping[str, tuple[int, int]]
"""Size and modification time in nanoseconds by path."""


def imported_files(but: Collection[str] = ()) -> Files:
    """Return the files of the modules that this process has imported, without Python's own and installed
    packages.

    Args:
        but: names of modules that do not count.
    """
    return _files_of([name for name in list(sys.modules) if name not in but])


def _files_of(names: Iterable[str]) -> Files:
    installed = tuple({str(Path(prefix, "lib")) + os.sep for prefix in (sys.prefix, sys.base_prefix)})
    files = {}
    for name in names:
        path = getattr(sys.modules.get(name), "__file__", None)
        if path and not path.startswith(installed):
            files[path] = _state(path)
    return files


def files_behind(plugin: object) -> Files:
    """Return the files of the user's code behind a plug-in: asked in a process that has imported it."""
    return imported_files()


def is_changed(files: Files) -> bool:
    """Whether any of the files is not what it was."""
    return any(_state(path) != state for path, state in files.items())


_newest: str | None = None
"""Name of the newest module that this process has inherited; None: it was not forked."""


def note_inherited() -> None:
    """Note that this process was forked from one that has imported all that it has now. Of the modules only
    the newest is looked at: the memory of what a forked process touches is copied for it, and there are
    thousands."""
    global _newest
    _newest = next(reversed(sys.modules))


class OwnCode:
    """The user's code that a forked process has imported itself: another would import it as it is now."""

    def __init__(self) -> None:
        self._files: Files = {}

    def note(self) -> None:
        """Note what was imported since."""
        if _newest is not None:
            # one call of C: no other thread can import anything meanwhile
            since = list(itertools.takewhile(_newest.__ne__, reversed(sys.modules)))
            self._files = {**_files_of(since), **self._files}

    def has_changed(self) -> bool:
        return is_changed(self._files)


def _state(path: str) -> tuple[int, int]:
    """Return -1, -1 where there is no such file."""
    try:
        status = Path(path).stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns
