"""Writing archives: files are copied into a plain zip, and removed once it is known to hold them.

The archive is written under a private name, flushed, read back and compared with what was read; only then is
it linked, and only then are the files removed. Everything is reached through descriptors that were opened
before: when the run goes back meanwhile, what is written and removed is what was moved aside. Of two writers
one gets the name, and the other leaves everything as it is.
"""

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pipeline.run.durable import flush, hash_stream, opened_folder, private_file
from pipeline.run.inside import is_inside
from pipeline.run.packed import BadArchive
from pipeline.run.paths import RunPaths

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of every member, always the same, so that two drivers write the same bytes."""

Digests = Mapping[str, tuple[int, str]]
"""Size and xxh3_128 of files by path, relative to the run."""


@dataclass(frozen=True)
class Original:
    """A file that is to be packed."""

    folder: int
    """Descriptor of the folder that it was found in."""
    name: str
    path: str
    """Path relative to the run directory, as the archive names it."""


def originals_in(
    paths: RunPaths, folders: Iterable[Path], opened: contextlib.ExitStack
) -> Iterator[Original]:
    """Yield the files in some folders, but what links lead to.

    Args:
        opened: gets the descriptors of the folders.
    """
    for path in folders:
        if path.is_dir() and is_inside(paths.root, path / "file"):
            try:
                folder = opened.enter_context(opened_folder(path))
            except FileNotFoundError:  # removed meanwhile
                continue
            yield from (Original(folder, name, paths.relative(path / name)) for name in files_in(folder))


def files_in(folder: int) -> list[str]:
    """Return the names of the files in an opened folder, but for links, sorted."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))


def link_archive(
    history: int,
    name: str,
    originals: Sequence[Original],
    check: Callable[[zipfile.ZipFile, Digests], None] = lambda archive, digests: None,
) -> None:
    """Write the archive, flush it, read it back, compare, and link it, unless another was first.

    Args:
        history: descriptor of its folder.
        check: raises an error where what was read is not what it should be.

    Raises:
        BadArchive: the disk gives back something else than was written.
        OSError: the disk is full, for example.
    """
    with private_file(history, name) as (private, file):
        try:
            digests = _write(file, originals)
        except FileNotFoundError:  # another driver has packed it
            return
        flush(file)
        try:
            file.seek(0)
            with zipfile.ZipFile(file) as archive:
                check(archive, digests)
                _compare(archive, digests)
        except zipfile.BadZipFile as error:
            raise BadArchive(f"the disk gives back something else than was written ({error})") from error
        file.close()
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # another driver was first
            os.link(private, name, src_dir_fd=history, dst_dir_fd=history)
        os.fsync(history)


def _write(file: IO[bytes], originals: Sequence[Original]) -> Digests:
    """Copy the files into a zip. Returns size and xxh3_128 of each, as it was read."""
    digests = {}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for original in originals:
            descriptor = os.open(original.name, os.O_RDONLY, dir_fd=original.folder)
            with os.fdopen(descriptor, "rb") as source:
                info = zipfile.ZipInfo(original.path, _EPOCH)
                info.external_attr = 0o644 << 16
                with archive.open(info, "w", force_zip64=True) as target:
                    digests[original.path] = hash_stream(source, target)
    return digests


def _compare(archive: zipfile.ZipFile, digests: Digests) -> None:
    for path, digest in digests.items():
        with archive.open(path) as member:
            if hash_stream(member) != digest:
                raise BadArchive(f"{path} was not written as it was read")


def remove_held(history: int, name: str, originals: Iterable[Original]) -> None:
    """Remove the files that an archive holds, of any writer; others stay.

    Raises:
        BadArchive: it cannot be read.
    """
    descriptor = os.open(name, os.O_RDONLY, dir_fd=history)
    try:
        with os.fdopen(descriptor, "rb") as file, zipfile.ZipFile(file) as archive:
            held = {path: info.file_size for path, info in archive.NameToInfo.items()}
    except zipfile.BadZipFile as error:
        raise BadArchive(f"{name}, which was begun, cannot be read ({error})") from error
    for original in originals:
        with contextlib.suppress(FileNotFoundError):
            if os.stat(original.name, dir_fd=original.folder).st_size == held.get(original.path):
                os.unlink(original.name, dir_fd=original.folder)


def remove_private(history: int, name: str) -> None:
    """Remove unfinished archives of killed drivers. One that still writes finds that, and lets it be."""
    for found in os.listdir(history):
        if found.startswith(f".{name}."):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(found, dir_fd=history)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of some folders that are empty."""
    for folder in dict.fromkeys(folders):
        with contextlib.suppress(OSError):
            folder.rmdir()
