"""Packing: what an old iteration has becomes one archive, and stays readable: shards, records, tables that
its update has passed on, logs, and what was submitted to Slurm for it.

How an archive is written and the files are removed is :mod:`pipeline.run.archiving`'s. A driver that is
killed leaves the files, or an archive under its first name, with which the next one goes on.
"""

import contextlib
import itertools
import os
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pipeline.config.job_kinds import DRIVERS
from pipeline.run import journal
from pipeline.run.archiving import (
    Digests,
    Original,
    files_in,
    link_archive,
    originals_in,
    remove_empty,
    remove_held,
    remove_private,
)
from pipeline.run.commits import (
    CorruptData,
    FileEntry,
    Record,
    check_digest,
    is_of_the_past,
    read_record,
)
from pipeline.run.directory import Run
from pipeline.run.durable import flush, hash_stream, naming, opened_folder, private_file
from pipeline.run.identity import RunError
from pipeline.run.inside import is_inside
from pipeline.run.packed import (
    NEW,
    PACKED,
    BadArchive,
    archives,
    log_archives,
    next_log_archive,
    open_archive,
    opened_archive,
)
from pipeline.run.paths import PASSED_ON, RunPaths
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.states import oldest_needed
from pipeline.run.tasks import Stage, Task, task_of
from slurm.sharedfiles import from_json, names_in

_MOST_AT_ONCE = 4
"""Number of iterations that are packed by one call."""


def pack_old(run: Run, newest: int, in_use: Callable[[], Collection[str]] = tuple) -> Iterator[str]:
    """Pack every iteration that is update.keep_shards_last or more before ``newest``, which has a row, and
    that is not after the second-newest state, from which it might be learnt again.

    Costs a look at one packed iteration, however long the run is; of many that are due some are packed at a
    time, since the caller holds the run's lease. Yields a line for each iteration that
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
    keep = max(keep, run.plan.least_kept)
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
        folders, passed_on = [*_folders(paths, run.plan, iteration)], PassedOn.of(paths, update)
        found = [*originals_in(paths, folders, opened), *passed_on.originals(history)]
        originals = [original for original in found if original.path not in in_use]
        remove_private(history, NEW)
        if NEW not in os.listdir(history):
            with naming(archives(paths, iteration)[0]):
                _link(run.plan, iteration, originals, passed_on, history)
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
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # `clean` may be faster
            yield from sorted(folder.iterdir())
    yield paths.submissions(iteration)


def _log_folders(paths: RunPaths, plan: Plan, iteration: int) -> list[Path]:
    """Return the folders of the logs of an iteration's tasks and driver jobs, but for links."""
    kinds = dict.fromkeys(task.job_kind for task in plan.tasks(iteration))
    found = [paths.log_root / f"{iteration:05d}-{kind}" for kind in (*kinds, *sorted(DRIVERS))]
    return [folder for folder in found if is_inside(paths.root, folder / NEW)]


@dataclass(frozen=True)
class PassedOn:
    """Tables of an update that tasks of the next iterations read (rollout.oversample, data.band)."""

    record: Record | None
    """Commit record of the update; None where it cannot be read, so that nothing is known of them."""

    @staticmethod
    def of(paths: RunPaths, update: Task) -> "PassedOn":
        with contextlib.suppress(CorruptData):
            return PassedOn(read_record(paths, update))
        return PassedOn(None)

    @property
    def entries(self) -> Iterator[FileEntry]:
        """Entries of the tables in the record."""
        if self.record is not None:
            yield from filter(None, (self.record.find_output(part, "arrow") for part in PASSED_ON))

    def originals(self, folder: int) -> list[Original]:
        """Return those that are in the update's folder, by its descriptor."""
        there = files_in(folder)
        named = ((entry.path.rpartition("/")[2], entry.path) for entry in self.entries)
        return [Original(folder, name, path) for name, path in named if name in there]

    def verify(self, digests: Digests) -> None:
        """Check that those that were read are what the record names: one that is gone is for its readers to
        miss. Raises CorruptData."""
        for entry in self.entries:
            if self.record is not None and entry.path in digests:
                check_digest(self.record, entry, *digests[entry.path])


def _link(plan: Plan, iteration: int, originals: list[Original], passed_on: PassedOn, history: int) -> None:
    """Write the archive, and link it under its first name once it holds what the commit records name."""

    def check(archive: zipfile.ZipFile, digests: Digests) -> None:
        _verify(archive, plan, iteration, digests)
        passed_on.verify(digests)

    link_archive(history, NEW, originals, check)


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
            if archive := opened_archive(path):
                for name in sorted(map(_checked, archive.namelist()), key=_is_record):
                    _restore(paths.root / name, archive, name)
        except (BadArchive, zipfile.BadZipFile, EOFError) as error:
            raise RunError(
                f"iteration {iteration} is packed, and {path} is damaged ({error}); go back to "
                f"rollout@{iteration} instead, which makes its shards again"
            ) from error
        path.unlink(missing_ok=True)


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


# --- logs ------------------------------------------------------------------------------------------------

# Those of an iteration, and its batch scripts, become an archive with its row, if it has many shards, which
# stay files meanwhile. What a worker prints between tasks is packed once its job has ended, as later
# archives of the same iteration. Few logs stay as they are: files are handier, and it is many that count.


MANY = 64
"""Number of sharded tasks of an iteration from which on its logs are packed."""
_FEWEST = 16
"""Least number of logs that are worth an archive."""
_MOST = 2000
"""Most logs of an iteration that are packed by one call: the caller holds the run's lease meanwhile."""
_RECENT = 20
"""Number of newest iterations that are looked at: a pass costs the same however long the run is."""


def pack_logs(run: Run, newest: int, in_use: Callable[[], Collection[str]] = tuple) -> Iterator[str]:
    """Pack the logs of the newest iterations up to ``newest``, which has a row, but for their updates'.

    Costs one listing where all is packed. Yields a line for each iteration whose logs cannot be packed.

    Args:
        in_use: lookup of the files, by paths relative to the run, that stay as they are: a job may still
            write them. Called only where something is to be packed.

    Raises:
        OSError: the disk is full, for example. All that was not packed is still there.
    """
    sharded = [kind for kind in run.plan.job_kinds if task_of(1, kind).stage.is_sharded]
    if len(sharded) * run.plan.num_shards < MANY:
        return
    kinds = (*sharded, Stage.EVALUATE, *sorted(DRIVERS))  # an update writes on, behind its policy
    listed = names_in(run.paths.log_root)
    for iteration in range(max(run.plan.start, newest - _RECENT) + 1, newest + 1):
        left = [name for kind in kinds if (name := f"{iteration:05d}-{kind}") in listed]
        if left:
            try:
                _pack(run.paths, iteration, [run.paths.log_root / name for name in left], in_use())
            except BadArchive as error:
                yield f"the logs of iteration {iteration} are not packed: {error}"


def _pack(paths: RunPaths, iteration: int, folders: list[Path], in_use: Collection[str]) -> None:
    """Pack the logs in some folders, if they are many. Idempotent: a log that was packed and is still there,
    as its driver was killed, goes first.

    Raises:
        BadArchive: an archive that is there, or was just written, cannot be read.
    """
    target = next_log_archive(paths, iteration)
    if not is_inside(paths.root, target):
        raise BadArchive(f"{target.parent} is a link, and nothing outside of the run is touched")
    attempts = [path / name for path in folders for name in sorted(names_in(path))]
    with contextlib.ExitStack() as opened:
        found = originals_in(paths, [*attempts, paths.submissions(iteration)], opened)
        closed = (o for o in found if o.path not in in_use and _is_for_people(o))
        originals = list(itertools.islice(closed, _MOST))
        if len(originals) < _FEWEST:
            return
        history: int = opened.enter_context(opened_folder(target.parent))
        for archive in log_archives(paths, iteration):
            remove_held(history, archive.name, originals)
        left = [original for original in originals if _is_there(original)]
        if len(left) >= _FEWEST:
            _pack_into(target, history, left)
        if not is_of_the_past(paths, policy_maker(iteration), history):
            remove_empty([*attempts, *folders])
            journal.event(paths.events, "logs_packed", iteration=iteration, files=len(originals))


def _pack_into(target: Path, history: int, logs: list[Original]) -> None:
    """Write an archive, unless another driver does, and remove what it holds."""
    remove_private(history, target.name)
    with naming(target):
        link_archive(history, target.name, logs)
    if target.name in os.listdir(history):
        remove_held(history, target.name, logs)


def _is_for_people(original: Original) -> bool:
    """Whether it is a log, or a batch script, of which Slurm has its own copy; the rest of a submission is
    read by every pass."""
    return original.path.startswith("logs/") or original.name.endswith(".sh")


def _is_there(original: Original) -> bool:
    try:
        os.stat(original.name, dir_fd=original.folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
