"""What a stage gets besides its task: configuration, verified inputs, private output paths, a stopwatch."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from xxhash import xxh3_128_hexdigest

from pipeline.config.schema import Config
from pipeline.run.commits import (
    FileEntry,
    Record,
    StaleData,
    check_digest,
    check_sizes,
    is_unchanged,
    require_record,
)
from pipeline.run.durable import digest_file, read_shared
from pipeline.run.paths import RunPaths, TaskPaths
from pipeline.run.plan import policy_maker
from pipeline.run.retention import check_is_kept
from pipeline.run.schemas import PROMPTS
from pipeline.run.shards import read_shard
from pipeline.run.tasks import PREPARE, Stage, Task, task_key


class UserError(ValueError):
    """Something the user gave cannot work, and trying again cannot help."""


class NumericalError(RuntimeError):
    """A loss, gradient or weight is not finite. The same inputs would give it again."""


class OutOfMemory(RuntimeError):
    """The message says what to change."""

    def __init__(self, message: str, on_device: bool) -> None:
        super().__init__(message)
        self.on_device = on_device
        """A GPU's memory, which no retry makes larger; else the host's, of which a retry may get more."""


@dataclass(frozen=True)
class Result:
    """What a stage made: durable, hashed files of this attempt, ready to be committed."""

    outputs: tuple[FileEntry, ...]
    rows: int
    schema: str
    policy_version: int
    metrics: Mapping[str, float]


@dataclass
class Stopwatch:
    """Wall seconds of the named parts of a stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Add the time in this block to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass
class Context:
    """One attempt at a task."""

    paths: RunPaths
    config: Config
    task: Task
    attempt: str
    lineage: dict[str, str] = field(default_factory=dict)
    """Filled by reading: task key -> fingerprint. Becomes the record's inputs."""
    compute_seconds: float = 0.0
    first_compute: float | None = None
    """When a model began to compute, unix time; None before, and in tasks without a model."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    verifies: bool = True
    """Whether to hash directories that are read. Of several ranks one does, for all."""

    @property
    def files(self) -> TaskPaths:
        return self.paths.task(self.task)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Count the time in this block as model compute."""
        self.first_compute = self.first_compute or time.time()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.compute_seconds += time.perf_counter() - start

    def read(self, task: Task) -> Record:
        """The record of an input, noted as lineage.

        Raises:
            NotCommitted, CorruptData: there is none, or it cannot be read.
            StaleData: it was computed from something else than what this task has read before.
        """
        record = require_record(self.paths, task)
        for key, fingerprint in record.inputs.items():
            if self.lineage.get(key, fingerprint) != fingerprint:
                raise StaleData(task, f"it was computed from another result of {key} than is committed now")
        self.lineage[task_key(task)] = record.fingerprint
        return record

    def table(self, task: Task, schema: pa.Schema, part: str = "") -> pa.Table:
        """One Arrow file of an input, verified."""
        return read_shard(self.paths, self.read(task), schema, part)

    def prompts(self) -> pa.Table:
        """All usable training prompts, in the file's order."""
        return self.table(PREPARE, PROMPTS)

    def heldout(self) -> pa.Table:
        return self.table(PREPARE, PROMPTS, "heldout")

    def json(self, task: Task, part: str) -> dict[str, Any]:
        """One JSON file of an input, verified."""
        record = self.read(task)
        entry = record.output(part, "json")
        path = self.paths.root / entry.path
        try:
            text = read_shared(path)
        except FileNotFoundError:
            text = b""
        check_digest(record, entry, len(text), xxh3_128_hexdigest(text))
        content: dict[str, Any] = json.loads(text)
        return content

    def source(self, directory: str) -> Path:
        """A model directory of the user's, as it was when the run began.

        Size and modification time say whether to look closer; then the hash that prepare recorded decides.

        Raises:
            UserError: a file of it has changed.
        """
        if self.task.stage is Stage.PREPARE:
            return Path(directory)
        for key, recorded in self.read(PREPARE).inputs.items():
            path = Path(key.removeprefix("file:"))
            if path.is_relative_to(directory) and not is_unchanged(path, recorded):
                raise UserError(
                    f"{path} has changed since the run began, so its results would not belong together; "
                    "restore it, or start a new run"
                )
        return Path(directory)

    def policy_directory(self, version: int) -> Path:
        """Directory of a policy, every file of it verified. Version 0 is the user's model."""
        return self._directory(version, self.paths.policies) or self.source(self.config.model.policy)

    def critic_directory(self, version: int) -> Path | None:
        """Directory of a critic; None for version 0, which starts from the configuration."""
        return self._directory(version, self.paths.critics)

    def trainer_directory(self, version: int) -> Path | None:
        """Directory of the trainer's state; None for version 0, which has none."""
        return self._directory(version, self.paths.trainers)

    def _directory(self, version: int, parent: Path) -> Path | None:
        """A directory that an update committed, its files verified. Raises Thinned where it was removed."""
        record = self.read(policy_maker(version))
        if version == 0:
            return None
        check_is_kept(self.paths, record, parent.name)
        check_sizes(self.paths, record)
        folders = set()
        for entry in record.outputs:
            path = self.paths.root / entry.path
            if path.is_relative_to(parent):
                if self.verifies:
                    check_digest(record, entry, *digest_file(path))
                folders.add(parent / path.relative_to(parent).parts[0])
        assert len(folders) == 1, f"{record.task} committed {folders}"
        return folders.pop()
