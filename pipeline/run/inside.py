"""What is removed or moved of a run lies in its directory: no link on the way there is followed."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def folder_of(root: Path, path: Path) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the folder that a path lies in, and its name there.

    Args:
        root: the run directory, which may be a link.
        path: below it.

    Raises:
        OSError: there is no such folder, or one of those above ``path`` is a link.
    """
    *folders, name = path.relative_to(root).parts
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for depth, folder in enumerate(folders):
            inner = _opened(descriptor, folder, root.joinpath(*folders[: depth + 1]))
            os.close(descriptor)
            descriptor = inner
        yield descriptor, name
    finally:
        os.close(descriptor)


def _opened(above: int, name: str, path: Path) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except NotADirectoryError:
        why = "it is a link, or no folder; nothing outside of the run is touched"
        raise OSError(errno.ELOOP, why, str(path)) from None


def is_inside(root: Path, path: Path) -> bool:
    """Whether no link leads out of the run on the way to a path, which may be one itself."""
    try:
        with folder_of(root, path):
            return True
    except OSError:
        return False


def remove(root: Path, path: Path) -> None:
    """Remove a file, a link or a whole folder of a run. Raises OSError as :func:`folder_of`."""
    with folder_of(root, path) as (folder, name):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def move(root: Path, path: Path, target: Path) -> None:
    """Move something within a run, into a folder that is there. Raises OSError as :func:`folder_of`."""
    with folder_of(root, path) as (source, name), folder_of(root, target) as (folder, new):
        os.rename(name, new, src_dir_fd=source, dst_dir_fd=folder)
