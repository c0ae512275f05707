"""Packed iterations: how shards, records and logs are read that :mod:`pipeline.run.packing` has put together.

A plain zip without compression, in the folder of the iteration's update, with the names that the files had
in the run directory. While it has its first name the files may still be there, too; whoever finds no file
looks for the first name, then for the last.
"""

import os
import zipfile
from functools import lru_cache
from pathlib import Path

from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Stage, Task

NEW = "shards.new.zip"
"""The archive while the files that it holds may still be there."""
PACKED = "shards.zip"


class BadArchive(ValueError):
    """An archive, or what it holds, is not what was written."""


def archives(paths: RunPaths, iteration: int) -> tuple[Path, Path]:
    """Its two names, in the order in which to look."""
    folder = paths.task(Task(iteration, Stage.UPDATE)).folder
    return folder / NEW, folder / PACKED


def read_packed(paths: RunPaths, iteration: int, name: str) -> bytes | None:
    """The content of a file of an iteration, or None where none was packed.

    Args:
        name: relative to the run directory.

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
    """Bytes of a file of an iteration, or None where none was packed. Raises BadArchive."""
    archive = open_archive(paths, iteration)
    info = archive.NameToInfo.get(name) if archive else None
    return None if info is None else info.file_size


def packed_names(paths: RunPaths, iteration: int) -> frozenset[str]:
    """Names of what was packed, relative to the run directory. Raises BadArchive."""
    archive = open_archive(paths, iteration)
    return frozenset(archive.NameToInfo) if archive else frozenset()


def open_archive(paths: RunPaths, iteration: int) -> zipfile.ZipFile | None:
    """The archive of an iteration, kept open for the next question; None where there is none."""
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
    """Its list of contents is long where shards are many, so it is not read for each of them."""
    return zipfile.ZipFile(os.fspath(path))
