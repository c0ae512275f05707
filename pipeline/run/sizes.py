"""Sizes of what lies below a folder."""

import contextlib
import os
from pathlib import Path


def bytes_below(path: Path | str) -> int:
    """Return the bytes of a file, or of all files below a folder. Links count nothing, and what goes away
    meanwhile counts nothing."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    total += bytes_below(entry.path) if entry.is_dir(follow_symlinks=False) else _size(entry)
        except NotADirectoryError:
            return os.lstat(path).st_size
    return total


def _size(entry: "os.DirEntry[str]") -> int:
    try:
        return 0 if entry.is_symlink() else entry.stat().st_size
    except FileNotFoundError:
        return 0
