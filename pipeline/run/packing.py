"""Packing: shards, records and logs of an old iteration become one archive, and stay readable.

The archive is written under a private name, flushed, read back and compared with what was read and with the
commit records; only then is it linked, and only then are the files removed. Everything is reached through
descriptors that were opened before: when the run goes back meanwhile, what is written and removed is what
was moved aside. A driver that is killed leaves the files, or an archive under its first name, with which
the next one goes on.
"""

import contextlib
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from pipeline.run import journal
from pipeline.run.commits import CorruptData, Record, check_digest, is_of_the_past
from pipeline.run.directory import Run
from pipeline.run.durable import flush, hash_stream, naming, opened_folder, private_file
from pipeline.run.identity import RunError
from pipeline.run.inside import is_inside
from pipeline.run.packed import NEW, PACKED, BadArchive, archives, open_archive
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.states import oldest_needed
from pipeline.run.tasks import Task
from slurm.sealing import from_json

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of every member, always the same, so that two drivers write the same bytes."""


@dataclass(frozen=True)
class Original:
    """A file that is to be packed."""

    folder: int
    """Descriptor of the folder that it was found in."""
    name: str
    path: str
    """Path relative to the run directory, as the archive names it."""


def pack_old(run: Run, newest: int) -> Iterator[str]:
    """Pack every iteration that is update.keep_shards_last or more before ``newest``, which has a row, and
    that is not after the second-newest state, from which it might be learnt again.

    Costs a look at one packed iteration, however long the run is. Yields a line for each iteration that
    cannot be packed, since what is there of it does not verify; it stays as it is.

    Raises:
        OSError: the disk is full, for example. All that was not packed is still there.
    """
    keep = run.config.update.keep_shards_last
    if keep is None:
        return
    last = min(newest - keep, oldest_needed(run.plan, run.paths, newest))
    for iteration in unpacked(run.paths, run.plan, last):
        try:
            pack(run, iteration)
        except (CorruptData, BadArchive) as error:
            yield f"iteration {iteration} is not packed: {error}"


def unpacked(paths: RunPaths, plan: Plan, last: int) -> list[int]:
    """Return the iterations up to ``last`` that are to be packed, ascending: those before them are packed."""
    found: list[int] = []
    for iteration in range(last, plan.start, -1):
        if archives(paths, iteration)[1].exists():
            break
        found.append(iteration)
    return found[::-1]


def pack(run: Run, iteration: int) -> None:
    """Pack one iteration, or finish what a killed driver began. Idempotent.

    Raises:
        CorruptData: what is there does not verify.
        BadArchive: an archive that was begun, or just written, cannot be read.
    """
    paths, update = run.paths, policy_maker(iteration)
    if not is_inside(paths.root, archives(paths, iteration)[0]):
        raise BadArchive(f"{paths.task(update).folder} is a link, and nothing outside of the run is touched")
    with contextlib.ExitStack() as opened:
        history: int = opened.enter_context(opened_folder(paths.task(update).folder))
        originals = list(_originals(paths, run.plan, iteration, opened))
        _remove_private(history)
        if NEW not in os.listdir(history):
            with naming(archives(paths, iteration)[0]):
                _link_archive(run.plan, iteration, originals, history)
        if NEW not in os.listdir(history):  # another driver is further
            return
        _remove(history, originals)
        if not is_of_the_past(paths, update, history):
            _remove_folders(paths, run.plan, iteration)
            journal.event(paths.events, "packed", iteration=iteration, files=len(originals))
        with contextlib.suppress(FileNotFoundError):  # another driver was first
            os.rename(NEW, PACKED, src_dir_fd=history, dst_dir_fd=history)
        os.fsync(history)


def _folders(paths: RunPaths, plan: Plan, iteration: int) -> Iterator[Path]:
    """Yield the folders whose files are packed: those of sharded stages, and of every attempt's logs. What a
    link leads to is left alone."""
    tasks = {task.job_kind: task for task in plan.tasks(iteration)}
    found = [paths.task(task).folder for task in tasks.values() if task.stage.is_sharded]
    for task in tasks.values():
        logs = paths.logs(task)
        found += sorted(logs.iterdir()) if logs.is_dir() else ()
    yield from (folder for folder in found if is_inside(paths.root, folder / NEW))


def _originals(
    paths: RunPaths, plan: Plan, iteration: int, opened: contextlib.ExitStack
) -> Iterator[Original]:
    for path in _folders(paths, plan, iteration):
        if path.is_dir():
            folder = opened.enter_context(opened_folder(path))
            with os.scandir(folder) as entries:
                names = sorted(e.name for e in entries if e.is_file(follow_symlinks=False))
            yield from (Original(folder, name, paths.relative(path / name)) for name in names)


def _link_archive(plan: Plan, iteration: int, originals: list[Original], history: int) -> None:
    """Write the archive, flush it, read it back, compare, and link it under its first name."""
    with private_file(history, NEW) as (private, file):
        digests = _write(file, originals)
        flush(file)
        try:
            _verify(file, plan, iteration, digests)
        except zipfile.BadZipFile as error:
            raise BadArchive(f"the disk gives back something else than was written ({error})") from error
        file.close()
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # another driver was first
            os.link(private, NEW, src_dir_fd=history, dst_dir_fd=history)
        os.fsync(history)


def _remove_private(history: int) -> None:
    """Remove unfinished archives of killed drivers. One that still writes finds that, and lets it be."""
    for name in os.listdir(history):
        if name.startswith(f".{NEW}."):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=history)


def _write(file: IO[bytes], originals: list[Original]) -> dict[str, tuple[int, str]]:
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


def _verify(file: IO[bytes], plan: Plan, iteration: int, digests: dict[str, tuple[int, str]]) -> None:
    """Check that the archive holds what was read, and what the commit records name.

    Raises:
        CorruptData: it does not; the message names the file.
    """
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        for task in plan.tasks(iteration):
            if task.stage.is_sharded:
                _verify_commit(archive, task, digests)
        for path, digest in digests.items():
            with archive.open(path) as member:
                if hash_stream(member) != digest:
                    raise CorruptData(policy_maker(iteration), f"{path} was not written as it was read")


def _verify_commit(archive: zipfile.ZipFile, task: Task, digests: dict[str, tuple[int, str]]) -> None:
    """Compare a task's files with its record, which may be lost since its iteration. Raises CorruptData."""
    name = f"iterations/{task.iteration:05d}/{task.job_kind}/{task.record_name}"
    if name not in digests:
        return
    try:
        record = Record.from_json(from_json(archive.read(name)))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptData(task, f"its record {name} cannot be read ({error})") from error
    for entry in record.outputs:
        if entry.path not in digests:
            raise CorruptData(task, f"{entry.path} is gone")
        check_digest(record, entry, *digests[entry.path])


def _remove(history: int, originals: list[Original]) -> None:
    """Remove the files that the archive holds, whoever wrote it; any others stay."""
    descriptor = os.open(NEW, os.O_RDONLY, dir_fd=history)
    try:
        with os.fdopen(descriptor, "rb") as file, zipfile.ZipFile(file) as archive:
            held = {name: info.file_size for name, info in archive.NameToInfo.items()}
    except zipfile.BadZipFile as error:
        raise BadArchive(f"{NEW}, which was begun, cannot be read ({error})") from error
    for original in originals:
        with contextlib.suppress(FileNotFoundError):
            if os.stat(original.name, dir_fd=original.folder).st_size == held.get(original.path):
                os.unlink(original.name, dir_fd=original.folder)


def _remove_folders(paths: RunPaths, plan: Plan, iteration: int) -> None:
    """Remove the folders of packed files that are empty now."""
    logs = [paths.logs(task) for task in plan.tasks(iteration)]
    logs = [folder for folder in logs if is_inside(paths.root, folder)]
    for folder in dict.fromkeys((*_folders(paths, plan, iteration), *logs)):
        with contextlib.suppress(OSError):
            folder.rmdir()


def unpack(paths: RunPaths, iteration: int) -> None:
    """Restore the files, records after what they name, and remove the archive. Idempotent.

    Hashes are not compared here: readers compare every file with its record, and a record with its checksum,
    as ever.

    Raises:
        RunError: the archive cannot be read; the message names the way out.
    """
    new, packed = archives(paths, iteration)
    with contextlib.suppress(FileNotFoundError):
        packed.rename(new)
    try:
        if archive := open_archive(paths, iteration):
            for name in sorted(map(_checked, archive.namelist()), key=_is_record):
                _restore(paths.root / name, archive, name)
    except (BadArchive, zipfile.BadZipFile, EOFError) as error:
        raise RunError(
            f"iteration {iteration} is packed, and {new} is damaged ({error}); go back to "
            f"rollout@{iteration} instead, which makes its shards again"
        ) from error
    new.unlink(missing_ok=True)


def _checked(name: str) -> str:
    """Return a member's name if it leads to where packing finds files. Raises BadArchive otherwise."""
    parts = PurePosixPath(name).parts
    if parts[0] not in ("iterations", "logs") or ".." in parts:
        raise BadArchive(f"it holds {name!r}, which packing never writes")
    return name


def _is_record(name: str) -> bool:
    return name.startswith("iterations/") and name.endswith(".json")


def _restore(path: Path, archive: zipfile.ZipFile, name: str) -> None:
    """Restore one file, whole or not at all. One that is there already stays: nothing else has its name."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        naming(path),
        opened_folder(path.parent) as folder,
        private_file(folder, path.name) as (private, target),
    ):
        with archive.open(name) as source:
            hash_stream(source, target)
            flush(target)
        os.replace(private, path.name, src_dir_fd=folder, dst_dir_fd=folder)
