"""What is written, removed or moved of a run lies in its directory: no link on the way there is followed."""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from pipeline.run.paths import OWN_NAMES, RunPaths
from slurm.errors import UserError
from slurm.sharedfiles import persistently


def check_holds_no_links(paths: RunPaths, first: int) -> None:
    """Check, before a run goes on or back, that all that it writes to lies in its directory.

    Args:
        first: iteration from which on something may be written or moved.

    Raises:
        UserError: naming a link.
    """
    for link in _links(paths, first):
        raise _refused(link)


def open_to_write(path: Path, flags: int) -> int:
    """Open one of a run's own files, which is made where there is none, and return its descriptor.

    Raises:
        UserError: a link lies there.
    """
    flags |= os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return persistently(path, lambda: os.open(path, flags, 0o666))
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise _refused(path) from None
        raise


def _refused(link: Path) -> UserError:
    return UserError(
        f"{link} is a link, and a run touches nothing outside of its directory; put the file itself "
        "there, or move the whole run to other storage and link to that (mv, ln -s)"
    )


def _links(paths: RunPaths, first: int) -> Iterator[Path]:
    """Yield links in the place of the run's own files and folders."""
    yield from (path for path in _links_in(paths.root) if path.name in OWN_NAMES)
    for folder in (paths.data, paths.rows):
        yield from _links_at(folder)
    for folder in (paths.iterations, paths.log_root, paths.slurm):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            number = re.match("[0-9]+", path.name)
            if number and int(number[0]) >= first:
                yield from _links_at(path)


def _links_at(path: Path) -> Iterator[Path]:
    """Yield a path if it is a link, or all links below it."""
    if path.is_symlink():
        yield path
    elif path.is_dir():
        for folder, _, _ in os.walk(path):
            yield from _links_in(Path(folder))


def _links_in(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_symlink())


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
    descriptor = persistently(root, lambda: os.open(root, os.O_RDONLY | os.O_DIRECTORY))
    try:
        for depth, folder in enumerate(folders):
            inner = _opened(descriptor, folder, root.joinpath(*folders[: depth + 1]))
            os.close(descriptor)
            descriptor = inner
        yield descriptor, name
    finally:
        os.close(descriptor)


def _opened(above: int, name: str, path: Path) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        return persistently(path, lambda: os.open(name, flags, dir_fd=above))
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
