"""The user's code that a process has imported, to see when a new process would import other code."""

import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

Files = Mapping[str, tuple[int, int]]
"""Size and modification time in nanoseconds by path."""


def imported_files(but: Collection[str] = ()) -> Files:
    """Return the files of the modules that this process has imported, without Python's own and installed
    packages.

    Args:
        but: names of modules that do not count, such as those that every process inherits.
    """
    installed = tuple({str(Path(prefix, "lib")) + os.sep for prefix in (sys.prefix, sys.base_prefix)})
    files = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name not in but and path and not path.startswith(installed):
            files[path] = _state(path)
    return files


def files_behind(plugin: object) -> Files:
    """Return the files of the user's code behind a plug-in: asked in a process that has imported it."""
    return imported_files()


def is_changed(files: Files) -> bool:
    """Whether any of the files is not what it was."""
    return any(_state(path) != state for path, state in files.items())


def _state(path: str) -> tuple[int, int]:
    """Return -1, -1 where there is no such file."""
    try:
        status = Path(path).stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns
