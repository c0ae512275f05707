"""Packed iterations: reading what :mod:`pipeline.run.packing` and :mod:`pipeline.run.packing` put into
archives.

An archive is a plain zip without compression, in the folder of the iteration's update; its members have the
names that the files had in the run directory. An iteration has one of shards, and of all that is small, once
it is old, and before that some of logs. While an archive of shards has its first name the files may still be
there, too; a reader that finds no file looks for the first name, then for the last.
"""

import os
import re
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Stage, Task
from slurm.sharedfiles import names_in, read_shared

NEW = "shards.new.zip"
"""First name of an archive, while the files that it holds may still be there."""
PACKED = "shards.zip"
_LOGS = re.compile(r"logs-(\d+)\.zip")


class BadArchive(ValueError):
    """An archive, or what it holds, is not what was written."""


def archives(paths: RunPaths, iteration: int) -> tuple[Path, Path]:
    """Return the two names of an iteration's archive, in the order in which to look."""
    folder = paths.task(Task(iteration, Stage.UPDATE)).folder
    return folder / NEW, folder / PACKED


def log_archives(paths: RunPaths, iteration: int) -> list[Path]:
    """Return an iteration's archives of logs, newest first."""
    folder = archives(paths, iteration)[0].parent
    return [folder / f"logs-{number}.zip" for number in sorted(_log_numbers(folder), reverse=True)]


def next_log_archive(paths: RunPaths, iteration: int) -> Path:
    """Return the path of an iteration's next archive of logs; they count from 1."""
    folder = archives(paths, iteration)[0].parent
    return folder / f"logs-{1 + max(_log_numbers(folder), default=0)}.zip"


def _log_numbers(folder: Path) -> list[int]:
    return [int(found[1]) for found in map(_LOGS.fullmatch, names_in(folder)) if found]


def read_packed(paths: RunPaths, iteration: int, name: str) -> bytes | None:
    """Return the content of a file of an iteration, or None where it was not packed.

    Args:
        name: path of the file relative to the run directory.

    Raises:
        BadArchive: a bit has flipped in it, or the archive is cut.
    """
    for archive in _archives_with(paths, iteration, name):
        if name in archive.NameToInfo:
            try:
                return archive.read(name)
            except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
                raise BadArchive(f"{name} in {archive.filename} cannot be read ({error})") from error
    return None


def read_file(paths: RunPaths, iteration: int, path: Path) -> bytes:
    """Return the content of a file of an iteration, wherever it is by now.

    Raises:
        FileNotFoundError: it is neither there nor packed.
        OSError: see :func:`slurm.sharedfiles.read_shared`.
        BadArchive: as :func:`read_packed`.
    """
    try:
        return read_shared(path)
    except FileNotFoundError:
        content = read_packed(paths, iteration, paths.relative(path))
        if content is None:
            raise
        return content


def packed_size(paths: RunPaths, iteration: int, name: str) -> int | None:
    """Return the bytes of a file of an iteration, or None where it was not packed. Raises BadArchive."""
    found = (archive.NameToInfo.get(name) for archive in _archives_with(paths, iteration, name))
    return next((info.file_size for info in found if info), None)


def packed_below(paths: RunPaths, iteration: int, folder: Path) -> set[str]:
    """Return the paths of an iteration's packed files that were below a folder, relative to that. Raises
    BadArchive."""
    start = f"{paths.relative(folder)}/"
    found = (archive.NameToInfo for archive in _archives_with(paths, iteration, start))
    return {name.removeprefix(start) for names in found for name in names if name.startswith(start)}


def _archives_with(paths: RunPaths, iteration: int, name: str) -> Iterator[zipfile.ZipFile]:
    """Yield the archives that may hold what begins with a name, in the order in which to look."""
    if archive := open_archive(paths, iteration):
        yield archive
    if iteration > 0 and name.startswith(f"{paths.log_root.name}/"):
        yield from filter(None, map(opened_archive, log_archives(paths, iteration)))


def open_archive(paths: RunPaths, iteration: int) -> zipfile.ZipFile | None:
    """Return an iteration's archive of shards, kept open for the next caller, or None. Raises BadArchive."""
    found = map(opened_archive, archives(paths, iteration) if iteration > 0 else ())
    return next(filter(None, found), None)


def opened_archive(path: Path) -> zipfile.ZipFile | None:
    """Return an archive, kept open for the next caller, or None where there is none. Raises BadArchive."""
    try:
        status = path.stat()
        return _opened(str(path), status.st_ino, status.st_size, status.st_mtime_ns)
    except FileNotFoundError:
        return None
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise BadArchive(f"{path} cannot be read ({error})") from error


@lru_cache(maxsize=4)
def _opened(path: str, *state: int) -> zipfile.ZipFile:
    """Open an archive; cached, since with many shards its list of contents is too long to read for each."""
    return zipfile.ZipFile(os.fspath(path))
