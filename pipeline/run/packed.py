"""Packed iterations: reading what :mod:`pipeline.run.packing` has put into archives (shards, records, logs).

An archive is a plain zip without compression, in the folder of the iteration's update; its members have the
names that the files had in the run directory. While it has its first name the files may still be there, too;
a reader that finds no file looks for the first name, then for the last.
"""

import os
import zipfile
from functools import lru_cache
from pathlib import Path

from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Stage, Task

NEW = "shards.new.zip"
"""First name of an archive, while the files that it holds may still be there."""
PACKED = "shards.zip"


class BadArchive(ValueError):
    """An archive, or what it holds, is not what was written."""


def archives(paths: RunPaths, iteration: int) -> tuple[Path, Path]:
    """Return the two names of an iteration's archive, in the order in which to look."""
    folder = paths.task(Task(iteration, Stage.UPDATE)).folder
    return folder / NEW, folder / PACKED


def read_packed(paths: RunPaths, iteration: int, name: str) -> bytes | None:
    """Return the content of a file of an iteration, or None where it was not packed.

    Args:
        name: path of the file relative to the run directory.

    Raises:
        BadArchive: a bit has flipped in it, or the archive is cut.
    """
    archive = open_archive(paths, iteration)
    if archive is None or name not in archive.NameToInfo:
        return None
    try:
        return archive.read(name)
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise BadArchive(f"{name} in {archive.filename} cannot be read ({error})") from error


def packed_size(paths: RunPaths, iteration: int, name: str) -> int | None:
    """Return the bytes of a file of an iteration, or None where it was not packed. Raises BadArchive."""
    archive = open_archive(paths, iteration)
    info = archive.NameToInfo.get(name) if archive else None
    return None if info is None else info.file_size


def packed_names(paths: RunPaths, iteration: int) -> frozenset[str]:
    """Return the paths of packed files, relative to the run directory. Raises BadArchive."""
    archive = open_archive(paths, iteration)
    return frozenset(archive.NameToInfo) if archive else frozenset()


def open_archive(paths: RunPaths, iteration: int) -> zipfile.ZipFile | None:
    """Return an iteration's archive, kept open for the next caller, or None. Raises BadArchive."""
    for path in archives(paths, iteration) if iteration > 0 else ():
        try:
            status = path.stat()
            return _opened(str(path), status.st_ino, status.st_size, status.st_mtime_ns)
        except FileNotFoundError:
            continue
        except (zipfile.BadZipFile, EOFError, ValueError) as error:
            raise BadArchive(f"{path} cannot be read ({error})") from error
    return None


@lru_cache(maxsize=2)
def _opened(path: str, *state: int) -> zipfile.ZipFile:
    """Open an archive; cached, since with many shards its list of contents is too long to read for each."""
    return zipfile.ZipFile(os.fspath(path))
