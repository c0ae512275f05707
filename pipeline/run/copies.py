"""Copies of committed files: verified on the way, and in a folder that appears whole or not at all."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pipeline.run.commits import CorruptData, FileEntry, Record, check_digest
from pipeline.run.durable import digest_file, flush, fsync_path, hash_stream
from pipeline.run.identity import RunError
from pipeline.run.paths import RunPaths

_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
"""Errors of link: another filesystem, one that has no hard links, or too many links to this file."""


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Make a private folder beside ``target`` that gets its name at the end, or is removed on failure.

    Raises:
        RunError: ``target`` is there and not an empty folder, or nothing can be made there.
    """
    check_is_vacant(target)
    private = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        private.mkdir(parents=True)
    except OSError as error:
        raise RunError(f"{target} cannot be made: {error}") from None
    try:
        yield private
        for folder, _, _ in os.walk(private):
            fsync_path(Path(folder))
        try:
            private.rename(target)
        except OSError as error:
            raise RunError(f"{target} cannot be made: {error}") from None
        fsync_path(target.parent)
    finally:
        if private.exists():
            shutil.rmtree(private)


def check_is_vacant(target: Path) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise RunError(f"{target} is a file or a link; choose another folder")
    if target.is_dir() and any(target.iterdir()):
        raise RunError(f"{target} exists and is not empty; choose another folder")


def copy_verified(paths: RunPaths, record: Record, entry: FileEntry, target: Path) -> None:
    """Copy a committed file, durably. Raises RunError when it is not what was committed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _as_committed(paths), (paths.root / entry.path).open("rb") as source, target.open("xb") as copy:
        found = hash_stream(source, copy)
        flush(copy)
        check_digest(record, entry, *found)


def link_verified(paths: RunPaths, record: Record, entry: FileEntry, target: Path) -> None:
    """Hard-link a committed file, or copy it where it cannot be. Raises RunError as :func:`copy_verified`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _as_committed(paths):
            os.link(paths.root / entry.path, target)
            check_digest(record, entry, *digest_file(target))
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        copy_verified(paths, record, entry, target)


@contextlib.contextmanager
def _as_committed(paths: RunPaths) -> Iterator[None]:
    try:
        yield
    except (CorruptData, FileNotFoundError) as error:
        raise RunError(f"{paths.root} no longer holds what was committed: {error}") from None
