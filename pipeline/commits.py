"""Done means committed: attempt-private files, hashed, published once by a record that readers verify.

Writing:   data under a name of the attempt's own -> fsync -> xxh3_128
           -> record under a private name -> fsync -> link to the record's name -> fsync of the folder.
``link`` fails when the name is taken, also over NFS, so of two attempts exactly one wins.
Reading:   record -> every file it names has the recorded size and hash, or :class:`CorruptData`.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError

from pipeline.conversion import converted
from pipeline.paths import RunPaths
from pipeline.tasks import Stage, Task, parse_task, task_key

RECORD_VERSION = 1
_CHUNK = 1 << 22


class NotCommitted(RuntimeError):
    """A task that is needed has no commit record."""

    def __init__(self, task: Task, where: Path) -> None:
        super().__init__(f"{task} is not committed: {where} does not exist")
        self.task = task


class CorruptData(RuntimeError):
    """What a commit record names is missing, cut or changed, or the record itself cannot be read."""

    def __init__(self, task: Task, why: str) -> None:
        super().__init__(f"{task} is corrupt: {why}")
        self.task = task


class StaleData(RuntimeError):
    """A task was computed from inputs that have since been computed anew with another result."""

    def __init__(self, task: Task, why: str) -> None:
        super().__init__(f"{task} is stale: {why}")
        self.task = task


@dataclass(frozen=True)
class FileEntry:
    """One data file of a commit. ``path`` is relative to the run directory, ``bytes`` its size."""

    path: str
    bytes: int
    xxh3_128: str

    @property
    def folder(self) -> str:
        """Of an update's file: the attempt's folder, e.g. ``policy/00003.1-ab``."""
        return "/".join(self.path.split("/")[:2])


@dataclass(frozen=True)
class Record:
    """The commit record of one task."""

    task: Task
    attempt: str
    outputs: tuple[FileEntry, ...]
    inputs: Mapping[str, str]
    """Lineage: task key of each input -> fingerprint of the outputs that were read."""
    policy_version: int
    """Version of the policy that was used; of the update stage: that was made."""
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
    metrics: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """One hash over all outputs: equal if and only if the same names hold the same bytes.

        Attempt ids are part of file names, so only the name's stable part counts.
        """
        lines = [
            f"{entry.path.replace('.' + self.attempt, '')} {entry.bytes} {entry.xxh3_128}"
            for entry in self.outputs
        ]
        return xxhash.xxh3_128_hexdigest("\n".join(sorted(lines)).encode())

    def to_json(self) -> dict[str, Any]:
        data = asdict(self) | {"task": task_key(self.task), "version": RECORD_VERSION}
        data |= {"inputs": dict(self.inputs), "metrics": dict(self.metrics)}
        return data | {"checksum": _checksum(data)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Record":
        """Raises KeyError, TypeError or ValueError on anything that is not a record of this version."""
        data = dict(data)
        if (version := data.pop("version")) != RECORD_VERSION:
            raise ValueError(f"record version {version}, this version of slurm-ppo reads {RECORD_VERSION}")
        if data.pop("checksum") != _checksum(data | {"version": version}):
            raise ValueError("its content does not have the checksum that it was written with")
        data["task"] = parse_task(str(data["task"]))
        try:
            return converted(Record, data)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
            raise ValueError("; ".join(problems)) from None


def _checksum(data: Mapping[str, Any]) -> str:
    """Of the values, not of the text: a record may be laid out anew, but not changed."""
    return xxhash.xxh3_128_hexdigest(json.dumps(data, sort_keys=True).encode())


def read_record(paths: RunPaths, task: Task) -> Record | None:
    """The task's commit record, or None when it is not committed.

    Raises:
        CorruptData: the record exists but cannot be read.
    """
    path = paths.task(task).record
    try:
        record = Record.from_json(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptData(task, f"its record {path} cannot be read ({error})") from error
    if record.task != task:
        raise CorruptData(task, f"its record {path} belongs to {record.task}")
    return record


def require_record(paths: RunPaths, task: Task) -> Record:
    """Like :func:`read_record`, for inputs. Raises :class:`NotCommitted` when there is none."""
    record = read_record(paths, task)
    if record is None:
        raise NotCommitted(task, paths.task(task).record)
    return record


def thinned_folders(paths: RunPaths, task: Task) -> frozenset[str]:
    """Folders of a commit that :mod:`pipeline.thinning` removed, named like ``policy/00003.1-ab``.

    Raises:
        CorruptData: the list of them cannot be read.
    """
    path = paths.task(task).thinned
    try:
        return frozenset(json.loads(path.read_bytes())["folders"])
    except FileNotFoundError:
        return frozenset()
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptData(task, f"{path} cannot be read ({error})") from error


def kept_outputs(paths: RunPaths, record: Record) -> Iterator[FileEntry]:
    """The files that must be there: all but those that were removed on purpose. Raises CorruptData."""
    gone = thinned_folders(paths, record.task) if record.task.stage is Stage.UPDATE else frozenset()
    return (entry for entry in record.outputs if entry.folder not in gone)


def check_sizes(paths: RunPaths, record: Record) -> None:
    """Notice missing and cut files by one stat each, without reading them. Raises CorruptData."""
    for entry in kept_outputs(paths, record):
        try:
            size = (paths.root / entry.path).stat().st_size
        except FileNotFoundError:
            raise CorruptData(record.task, f"{entry.path} is gone") from None
        if size != entry.bytes:
            raise CorruptData(record.task, f"{entry.path} has {size} bytes instead of {entry.bytes}")


def check_digest(record: Record, entry: FileEntry, size: int, digest: str) -> None:
    """Compare what was read with what was recorded. Raises CorruptData."""
    if size != entry.bytes:
        raise CorruptData(record.task, f"{entry.path} has {size} bytes instead of {entry.bytes}")
    if digest != entry.xxh3_128:
        raise CorruptData(record.task, f"{entry.path} has xxh3_128 {digest} instead of {entry.xxh3_128}")


def verify_outputs(paths: RunPaths, record: Record) -> None:
    """Read and hash every file the record names. Raises CorruptData naming the file."""
    check_sizes(paths, record)
    for entry in kept_outputs(paths, record):
        check_digest(record, entry, *digest_file(paths.root / entry.path))


def digest_file(path: Path) -> tuple[int, str]:
    """Size and xxh3_128 of a file as it is on disk."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def file_state(path: Path) -> str:
    """What :func:`is_unchanged` compares, of a file of the user's: hash, size, modification time."""
    status = path.stat()
    return f"{digest_file(path)[1]}:{status.st_size}:{status.st_mtime_ns}"


def is_unchanged(path: Path, recorded: str) -> bool:
    """Whether a file is what it was. Size and time say whether to look closer; then the hash decides."""
    digest, size, modified = recorded.split(":")
    if not path.exists():
        return False
    status = path.stat()
    if (str(status.st_size), str(status.st_mtime_ns)) == (size, modified):
        return True
    return digest_file(path)[1] == digest


def hash_file(paths: RunPaths, path: Path) -> FileEntry:
    """A file of the run as records name it."""
    return FileEntry(paths.relative(path), *digest_file(path))


def hash_tree(paths: RunPaths, folder: Path) -> tuple[FileEntry, ...]:
    """Make every file below ``folder`` durable and readable as the umask says, and hash it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        path.chmod(0o666 & ~_umask())  # safetensors writes its files for the owner only
    for path in (*files, *{file.parent for file in files}, folder.parent):
        fsync_path(path)
    return tuple(hash_file(paths, path) for path in files)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def fsync_path(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error say which file it is about: those of writing and flushing do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def private_copy(path: Path, text: str) -> Iterator[Path]:
    """``text``, flushed, under a private name beside ``path`` that is gone afterwards."""
    private = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with naming(path), private.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield private
    finally:
        private.unlink(missing_ok=True)


def replace_durably(path: Path, text: str) -> None:
    """Put ``text`` at ``path`` in one step: readers see the old file or the new one, never a part."""
    with private_copy(path, text) as private:
        private.replace(path)
    fsync_path(path.parent)


def link_once(path: Path, text: str) -> bool:
    """Publish ``text`` at ``path`` unless something is there. True if we did, false if another was first."""
    with private_copy(path, text) as private:
        try:
            os.link(private, path)
        except FileExistsError:
            # Over NFS the answer to a successful link can be lost and its repetition fail: look who is there.
            if private.stat().st_nlink != 2:
                return False
    fsync_path(path.parent)
    return True


def publish(paths: RunPaths, record: Record) -> bool:
    """Make the task done with this attempt's files; their data must be durable already.

    Returns:
        False if another attempt had already won; this attempt's files are then removed.
    """
    target = paths.task(record.task).record
    target.parent.mkdir(parents=True, exist_ok=True)
    if link_once(target, json.dumps(record.to_json(), indent=1) + "\n"):
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
