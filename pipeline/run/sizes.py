"""Sizes of what lies below a folder."""

import contextlib
import os
from pathlib import Path


def bytes_below(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder. Links are not followed, and what goes away
    meanwhile counts nothing."""
    with contextlib.suppress(FileNotFoundError):
        try:
            with os.scandir(path) as entries:
                return sum(map(_bytes_of, entries))
        except NotADirectoryError:
            return path.lstat().st_size
    return 0


def _bytes_of(entry: "os.DirEntry[str]") -> int:
    with contextlib.suppress(FileNotFoundError):
        if entry.is_dir(follow_symlinks=False):
            return bytes_below(Path(entry.path))
        return entry.stat(follow_symlinks=False).st_size
    return 0
