"""Packing: what an old iteration has becomes one archive, and stays readable: shards, records, logs, and what
was submitted to Slurm for it.

How an archive is written and the files are removed is :mod:`pipeline.run.archiving`'s. A driver that is
killed leaves the files, or an archive under its first name, with which the next one goes on.
"""

import contextlib
import os
import zipfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath

from pipeline.config.job_kinds import DRIVERS
from pipeline.run import journal
from pipeline.run.archiving import (
    Digests,
    Original,
    link_archive,
    originals_in,
    remove_empty,
    remove_held,
    remove_private,
)
from pipeline.run.commits import CorruptData, Record, check_digest, is_of_the_past
from pipeline.run.directory import Run
from pipeline.run.durable import flush, hash_stream, naming, opened_folder, private_file
from pipeline.run.identity import RunError
from pipeline.run.inside import is_inside
from pipeline.run.packed import NEW, PACKED, BadArchive, archives, log_archives, open_archive, opened_archive
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.states import oldest_needed
from pipeline.run.tasks import Task
from slurm.sealing import from_json

_MOST_AT_ONCE = 4
"""Number of iterations that are packed by one call."""


def pack_old(run: Run, newest: int, in_use: Callable[[], Collection[str]] = tuple) -> Iterator[str]:
    """Pack every iteration that is update.keep_shards_last or more before ``newest``, which has a row, and
    that is not after the second-newest state, from which it might be learnt again.

    Costs a look at one packed iteration, however long the run is; of many that are due some are packed at a
    time, as whoever calls holds the run's lease. Yields a line for each iteration that
    cannot be packed, since what is there of it does not verify; it stays as it is.

    Args:
        in_use: lookup of the files, by paths relative to the run, that stay as they are: a job may read or
            write them. Called only where something is to be packed.

    Raises:
        OSError: the disk is full, for example. All that was not packed is still there.
    """
    keep = run.config.update.keep_shards_last
    if keep is None:
        return
    last, count = min(newest - keep, oldest_needed(run.plan, run.paths, newest)), 0
    for iteration in unpacked(run.paths, run.plan, last):
        try:
            pack(run, iteration, in_use())
            count += 1
        except (CorruptData, BadArchive) as error:
            yield f"iteration {iteration} is not packed: {error}"
        if count == _MOST_AT_ONCE:
            return


def unpacked(paths: RunPaths, plan: Plan, last: int) -> list[int]:
    """Return the iterations up to ``last`` that are to be packed, ascending: those before them are packed."""
    found: list[int] = []
    for iteration in range(last, plan.start, -1):
        if archives(paths, iteration)[1].exists():
            break
        found.append(iteration)
    return found[::-1]


def pack(run: Run, iteration: int, in_use: Collection[str] = ()) -> None:
    """Pack one iteration, or finish what a killed driver began. Idempotent.

    Args:
        in_use: the files that stay as they are, by paths relative to the run.

    Raises:
        CorruptData: what is there does not verify.
        BadArchive: an archive that was begun, or just written, cannot be read.
    """
    paths, update = run.paths, policy_maker(iteration)
    if not is_inside(paths.root, archives(paths, iteration)[0]):
        raise BadArchive(f"{paths.task(update).folder} is a link, and nothing outside of the run is touched")
    with contextlib.ExitStack() as opened:
        history: int = opened.enter_context(opened_folder(paths.task(update).folder))
        folders = [*_folders(paths, run.plan, iteration)]
        originals = [o for o in originals_in(paths, folders, opened) if o.path not in in_use]
        remove_private(history, NEW)
        if NEW not in os.listdir(history):
            with naming(archives(paths, iteration)[0]):
                _link(run.plan, iteration, originals, history)
        if NEW not in os.listdir(history):  # another driver is further
            return
        remove_held(history, NEW, originals)
        if not is_of_the_past(paths, update, history):
            remove_empty([*folders, *_log_folders(paths, run.plan, iteration)])
            journal.event(paths.events, "packed", iteration=iteration, files=len(originals))
        with contextlib.suppress(FileNotFoundError):  # another driver was first
            os.rename(NEW, PACKED, src_dir_fd=history, dst_dir_fd=history)
        os.fsync(history)


def _folders(paths: RunPaths, plan: Plan, iteration: int) -> Iterator[Path]:
    """Yield the folders whose files are packed: those of sharded stages, of every attempt's and driver job's
    logs, and of submissions."""
    tasks = {task.job_kind: task for task in plan.tasks(iteration)}
    yield from (paths.task(task).folder for task in tasks.values() if task.stage.is_sharded)
    for folder in _log_folders(paths, plan, iteration):
        yield from sorted(folder.iterdir()) if folder.is_dir() else ()
    yield paths.submissions(iteration)


def _log_folders(paths: RunPaths, plan: Plan, iteration: int) -> list[Path]:
    """Return the folders of the logs of an iteration's tasks and driver jobs, but for links."""
    kinds = dict.fromkeys(task.job_kind for task in plan.tasks(iteration))
    found = [paths.log_root / f"{iteration:05d}-{kind}" for kind in (*kinds, *sorted(DRIVERS))]
    return [folder for folder in found if is_inside(paths.root, folder / NEW)]


def _link(plan: Plan, iteration: int, originals: list[Original], history: int) -> None:
    """Write the archive, and link it under its first name once it holds what the commit records name."""
    link_archive(history, NEW, originals, lambda archive, of: _verify(archive, plan, iteration, of))


def _verify(archive: zipfile.ZipFile, plan: Plan, iteration: int, digests: Digests) -> None:
    """Check that what was read is what the commit records name. Raises CorruptData, which names the file."""
    for task in plan.tasks(iteration):
        if task.stage.is_sharded:
            _verify_commit(archive, task, digests)


def _verify_commit(archive: zipfile.ZipFile, task: Task, digests: Digests) -> None:
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


def restore_submissions(paths: RunPaths, iterations: Collection[int]) -> None:
    """Restore what was submitted for packed iterations, before their archives are moved aside with their
    history: no number of a submission, and with it no name of a job, is used twice."""
    for iteration in iterations:
        # A damaged archive goes aside as it is: what was submitted for an old iteration has ended.
        with contextlib.suppress(BadArchive, zipfile.BadZipFile, EOFError):
            if archive := open_archive(paths, iteration):
                start = f"{paths.relative(paths.submissions(iteration))}/"
                for name in (name for name in archive.namelist() if name.startswith(start)):
                    _restore(paths.root / _checked(name), archive, name)


def unpack(paths: RunPaths, iteration: int) -> None:
    """Restore the files, records after what they name, and remove the archives. Idempotent.

    Hashes are not compared here: readers compare every file with its record, and a record with its checksum,
    as ever.

    Raises:
        RunError: the archive cannot be read; the message names the way out.
    """
    new, packed = archives(paths, iteration)
    with contextlib.suppress(FileNotFoundError):
        packed.rename(new)
    for path in (new, *log_archives(paths, iteration)):
        try:
            _restore_all(paths, path)
        except (BadArchive, zipfile.BadZipFile, EOFError) as error:
            raise RunError(
                f"iteration {iteration} is packed, and {path} is damaged ({error}); go back to "
                f"rollout@{iteration} instead, which makes its shards again"
            ) from error
        path.unlink(missing_ok=True)


def _restore_all(paths: RunPaths, path: Path) -> None:
    """Restore what an archive holds, records after what they name. Raises BadArchive and zipfile's errors."""
    if archive := opened_archive(path):
        for name in sorted(map(_checked, archive.namelist()), key=_is_record):
            _restore(paths.root / name, archive, name)


def _checked(name: str) -> str:
    """Return a member's name if it leads to where packing finds files. Raises BadArchive otherwise."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] not in ("iterations", "logs", "slurm") or ".." in parts:
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
