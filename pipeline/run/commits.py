"""Done means committed: attempt-private files, hashed, published once by a record that readers verify.

Writing:   data under a name of the attempt's own -> fsync -> xxh3_128
           -> record under a private name -> fsync -> link to the record's name -> fsync of the folder.
``link`` fails when the name is taken, also over NFS, so of two attempts exactly one wins.
Reading:   record -> every file it names has the recorded size and hash, or :class:`CorruptData`.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError

from pipeline.config.conversion import converted, in_words
from pipeline.run.durable import digest_file, fsync_path, link_once_in, naming, opened_folder, umask
from pipeline.run.packed import BadArchive, packed_size, read_packed
from pipeline.run.paths import BASE, RunPaths, data_name
from pipeline.run.tasks import Stage, Task, parse_task, task_key
from slurm.sharedfiles import (
    NotAFile,
    checksum,
    from_json,
    is_there,
    make_folder,
    read_newest,
    read_shared,
    size_of,
)

RECORD_VERSION = 1


class BadCommit(RuntimeError):
    """A task whose result is needed is not there as it should be."""

    state = ""

    def __init__(self, task: Task, why: str) -> None:
        super().__init__(f"{task} is {self.state}: {why}")
        self.task = task
        self.why = why


class NotCommitted(BadCommit):
    """A task that is needed has no commit record."""

    state = "not committed"


class CorruptData(BadCommit):
    """A file that a commit record names is missing, cut or changed, or the record itself cannot be read."""

    state = "corrupt"


class StaleData(BadCommit):
    """A task was computed from inputs that have since been recomputed with another result."""

    state = "stale"


@dataclass(frozen=True)
class FileEntry:
    """One data file of a commit."""

    path: str
    """Path relative to the run directory; of a packed iteration a member of its ``shards.zip``."""
    bytes: int
    xxh3_128: str
    """Hash of the content."""

    def __post_init__(self) -> None:
        if self.path.startswith("/") or ".." in self.path.split("/"):
            raise ValueError(f"it names {self.path!r}, which is not below the run directory")

    @property
    def folder(self) -> str:
        """Folder of the attempt that holds an update's file, e.g. ``policy/00003.1-ab``."""
        return "/".join(self.path.split("/")[:2])


@dataclass(frozen=True)
class Record:
    """The commit record of one task."""

    task: Task
    """The task, with its iteration, stage, shard and, of stage score, pool."""
    attempt: str
    """Id of the attempt that won."""
    outputs: tuple[FileEntry, ...]
    inputs: Mapping[str, str]
    """Lineage: task key of each input -> fingerprint of the outputs that were read."""
    policy_version: int
    """Version of the policy that the task used; for the update stage, of the one it made."""
    seed: int
    rows: int
    schema: str
    """Name and version of the data's schema."""
    started: float
    """Unix time."""
    ended: float
    host: str
    pid: int
    job_id: str
    """Slurm's id of the job; empty for a process of one machine."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the task measured; rows of metrics.jsonl are made of them."""
    promises_state: bool = False
    """Whether the attempt, one at an update, commits the trainer's state (:func:`pipeline.run.plan.state_of`)
    after this record. If not, ``outputs`` hold it, or none was due, or the trainer keeps none."""
    skips_state: bool = False
    """Whether the trainer keeps a state, and an update commits none, as none was due (update.save_every)."""
    halvings: int = 0
    """Number of times that the batch budget was halved, as earlier attempts had run out of GPU memory."""

    @cached_property
    def fingerprint(self) -> str:
        """One hash over all outputs (:func:`fingerprint_of`)."""
        return fingerprint_of(self.outputs, self.attempt)

    @property
    def seconds(self) -> float:
        """Seconds from the attempt's start to its commit."""
        return self.ended - self.started

    @property
    def holds_state(self) -> bool:
        """Whether an update committed the trainer's state with its policy, as trainers of users may."""
        return any(entry.folder.startswith("trainer/") for entry in self.outputs)

    @property
    def is_adapter(self) -> bool:
        """Whether the policy that an update committed is the adapter of a model, not a model."""
        return any(entry.path == f"{entry.folder}/{BASE}" for entry in self.outputs)

    def output(self, part: str = "", suffix: str = "arrow") -> FileEntry:
        """Return the data file with this part and suffix (:meth:`TaskPaths.data`); the main one has no part.

        Raises:
            CorruptData: the record names no such file.
        """
        if not part and len(self.outputs) == 1:
            return self.outputs[0]
        if found := self.find_output(part, suffix):
            return found
        raise CorruptData(
            self.task, f"its record names no file {data_name(self.task, self.attempt, part, suffix)}"
        )

    def find_output(self, part: str, suffix: str) -> FileEntry | None:
        """Return the data file of this name, or None where the record names no such file."""
        name = data_name(self.task, self.attempt, part, suffix)
        return next((entry for entry in self.outputs if entry.path.rpartition("/")[2] == name), None)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self) | {"task": task_key(self.task), "version": RECORD_VERSION}
        data |= {"inputs": dict(self.inputs), "metrics": dict(self.metrics)}
        return data | {"checksum": checksum(data)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Record":
        """Parse a record. Raises KeyError, TypeError or ValueError on any that is not of this version."""
        data = dict(data)
        if (version := data.pop("version")) != RECORD_VERSION:
            raise ValueError(f"record version {version}, this version of slurm-ppo reads {RECORD_VERSION}")
        if data.pop("checksum") != checksum(data | {"version": version}):
            raise ValueError("its content does not have the checksum that it was written with")
        data["task"] = parse_task(str(data["task"]))
        try:
            return converted(Record, data)
        except ValidationError as error:
            raise ValueError(in_words(error)) from None


def fingerprint_of(outputs: Iterable[FileEntry], attempt: str) -> str:
    """Return one hash over an attempt's outputs: equal if and only if the same names hold the same bytes.

    Attempt ids are part of file names, so only the name's stable part counts.
    """
    lines = [f"{e.path.replace('.' + attempt, '')} {e.bytes} {e.xxh3_128}" for e in outputs]
    return xxhash.xxh3_128_hexdigest("\n".join(sorted(lines)).encode())


def read_record(paths: RunPaths, task: Task) -> Record | None:
    """Return the task's commit record, or None when it is not committed.

    Raises:
        CorruptData: the record exists but cannot be read.
    """
    path = paths.task(task).record
    try:
        content: bytes | None = read_shared(path)
    except FileNotFoundError:
        content = packed_content(paths, task, paths.relative(path)) if task.stage.is_sharded else None
    except NotAFile as error:
        raise CorruptData(task, f"its record {error}") from error
    if content is None:
        return None
    try:
        record = Record.from_json(from_json(content))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptData(task, f"its record {path} cannot be read ({error})") from error
    if record.task != task:
        raise CorruptData(task, f"its record {path} belongs to {record.task}")
    return record


def packed_content(paths: RunPaths, task: Task, name: str) -> bytes | None:
    """Return the content of a file of ``task`` that was packed, or None. Raises CorruptData."""
    with _archive_of(task):
        return read_packed(paths, task.iteration, name) if task.stage.has_packed_data else None


@contextlib.contextmanager
def _archive_of(task: Task) -> Iterator[None]:
    """Raise CorruptData where the archive that ``task`` is packed in cannot be read."""
    try:
        yield
    except BadArchive as error:
        raise CorruptData(task, str(error)) from error


@lru_cache(maxsize=64)
def _look_above(folder: Path) -> None:
    """Make the network filesystem's client look ``folder`` up again, once in the life of an attempt.

    The folder that it remembers may have been moved away by another machine when the run went back.
    """
    is_there(folder)


def forget_folders() -> None:
    """Look up all folders again from now on, as a process does that begins with another attempt."""
    _look_above.cache_clear()


def require_record(paths: RunPaths, task: Task) -> Record:
    """Return an input's record as :func:`read_record`. Raises :class:`NotCommitted` when there is none."""
    _look_above(paths.task(task).folder)
    record = read_record(paths, task)
    if record is None:
        raise NotCommitted(task, f"{paths.task(task).record} does not exist")
    return record


def thinned_folders(paths: RunPaths, task: Task) -> frozenset[str]:
    """Return the folders of a commit that :mod:`pipeline.run.retention` removed, e.g. ``policy/00003.1-ab``.

    Raises:
        CorruptData: the list of them cannot be read.
    """
    path = paths.task(task).thinned
    try:
        return frozenset(from_json(read_newest(path))["folders"])
    except FileNotFoundError:
        return frozenset()
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptData(task, f"{path} cannot be read ({error})") from error


def kept_outputs(paths: RunPaths, record: Record) -> Iterator[FileEntry]:
    """Return the files that must be there: all but those removed on purpose. Raises CorruptData."""
    is_thinned_out = record.task.stage in (Stage.UPDATE, Stage.STATE)
    gone = thinned_folders(paths, record.task) if is_thinned_out else frozenset()
    return (entry for entry in record.outputs if entry.folder not in gone)


def check_sizes(paths: RunPaths, record: Record) -> None:
    """Detect missing and cut files by one stat each, without reading them. Raises CorruptData."""
    for entry in kept_outputs(paths, record):
        size = _size(paths, record, entry)
        if size != entry.bytes:
            raise CorruptData(record.task, f"{entry.path} has {size} bytes instead of {entry.bytes}")


def _size(paths: RunPaths, record: Record, entry: FileEntry) -> int:
    """Return a committed file's size in bytes, packed or not. Raises CorruptData where it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return size_of(paths.root / entry.path)
    with _archive_of(record.task):
        is_packed = record.task.stage.has_packed_data
        size = packed_size(paths, record.task.iteration, entry.path) if is_packed else None
    if size is None:
        raise CorruptData(record.task, f"{entry.path} is gone")
    return size


def read_output(paths: RunPaths, record: Record, entry: FileEntry) -> bytes:
    """Return the content of a packed file. Raises CorruptData where it is gone, or is not what was packed."""
    content = packed_content(paths, record.task, entry.path)
    if content is None:
        raise CorruptData(record.task, f"{entry.path} is gone")
    return content


def check_digest(record: Record, entry: FileEntry, size: int, digest: str) -> None:
    """Compare the size and hash of what was read with those recorded. Raises CorruptData."""
    if size != entry.bytes:
        raise CorruptData(record.task, f"{entry.path} has {size} bytes instead of {entry.bytes}")
    if digest != entry.xxh3_128:
        raise CorruptData(record.task, f"{entry.path} has xxh3_128 {digest} instead of {entry.xxh3_128}")


def verify_outputs(paths: RunPaths, record: Record) -> None:
    """Read and hash every file that must be there. Raises CorruptData naming the file."""
    check_sizes(paths, record)
    for entry in kept_outputs(paths, record):
        try:
            found = digest_file(paths.root / entry.path)
        except (FileNotFoundError, NotAFile):
            content = read_output(paths, record, entry)
            found = len(content), xxhash.xxh3_128_hexdigest(content)
        check_digest(record, entry, *found)


def hash_file(paths: RunPaths, path: Path) -> FileEntry:
    """Hash a file of the run and return it as records name it."""
    return FileEntry(paths.relative(path), *digest_file(path))


def hash_tree(paths: RunPaths, folder: Path) -> tuple[FileEntry, ...]:
    """Make every file below ``folder`` durable and readable as the umask says, and hash it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        path.chmod(0o666 & ~umask())  # safetensors writes its files for the owner only
    for path in (*files, *{file.parent for file in files}, folder.parent):
        fsync_path(path)
    return tuple(hash_file(paths, path) for path in files)


@contextlib.contextmanager
def opened_history(paths: RunPaths, task: Task) -> Iterator[int]:
    """Open the task's folder as it is now, for :func:`publish`.

    An attempt opens it before it reads anything, and belongs to that history of the run: going back moves the
    folder away, and what the attempt commits later goes with it.
    """
    folder = paths.task(task).folder
    make_folder(folder, paths.root)  # not one that was moved away and that the client remembers
    with opened_folder(folder) as descriptor:
        yield descriptor


def is_of_the_past(paths: RunPaths, task: Task, history: int) -> bool:
    """Whether the run has gone back since ``history`` was opened."""
    folder = paths.task(task).folder
    try:
        return not (is_there(folder) and os.path.samestat(os.fstat(history), folder.stat()))
    except FileNotFoundError:
        return True


def publish(paths: RunPaths, record: Record, history: int | None = None) -> bool:
    """Commit the task with this attempt's files, whose data must be durable already.

    Args:
        history: descriptor from :func:`opened_history`; None for the run's present history.

    Returns:
        False if another attempt had already won; this attempt's files are then removed.
    """
    if history is None:
        with opened_history(paths, record.task) as present:
            return publish(paths, record, present)
    target = paths.task(record.task).record
    with naming(target):
        won = link_once_in(history, target.name, json.dumps(record.to_json(), indent=1) + "\n")
    if won:
        return True
    discard(paths, record)
    return False


def discard(paths: RunPaths, record: Record) -> None:
    """Remove the files of an attempt that lost, and the folders this empties."""
    for entry in record.outputs:
        (paths.root / entry.path).unlink(missing_ok=True)
        private = [folder for folder in Path(entry.path).parents if record.attempt in str(folder)]
        with contextlib.suppress(OSError):  # not empty yet: another file's turn
            for folder in private:
                (paths.root / folder).rmdir()
