"""The context of a stage: configuration, verified inputs, private output paths, a stopwatch."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa
from xxhash import xxh3_128_hexdigest

from pipeline.config.issue import UserError as UserError  # for stages, engines and trainers to raise
from pipeline.config.schema import Config
from pipeline.data.chat import Rendering
from pipeline.run.commits import (
    CorruptData,
    FileEntry,
    Record,
    StaleData,
    check_digest,
    check_sizes,
    require_record,
)
from pipeline.run.directory import load_run
from pipeline.run.durable import from_json, is_unchanged, read_shared
from pipeline.run.failures import FailureKind
from pipeline.run.identity import read_identity
from pipeline.run.paths import ADAPTER, RunPaths, TaskPaths
from pipeline.run.plan import Plan, policy_maker, state_of
from pipeline.run.retention import check_is_kept
from pipeline.run.shards import LISTING, listed, read_batches, read_rows, read_shard
from pipeline.run.states import state_record
from pipeline.run.tasks import PREPARE, Stage, Task, task_key
from pipeline.run.wide import take
from stages.files.policy import PolicyFiles
from stages.files.verification import verify_files, verify_once
from stages.process import background


class OtherRankFailed(RuntimeError):
    """Failure of another rank of this task, in its words."""


class Quoting(RuntimeError):
    """An error of a user's code in a process of its own, or of a service. Its message quotes what they say,
    or a response: words about a GPU in it are of another one, or of none."""


class NumericalError(RuntimeError):
    """A loss, gradient or weight is not finite. The same inputs would give it again."""

    failure_kind = FailureKind.NUMERICS


class OutOfMemory(RuntimeError):
    """Memory did not suffice. The message says what to change."""

    is_explained = True

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self.failure_kind = kind


@dataclass(frozen=True)
class StageResult:
    """The outputs of a stage: durable, hashed files of this attempt, ready to be committed."""

    outputs: tuple[FileEntry, ...]
    rows: int
    schema: str
    policy_version: int
    metrics: Mapping[str, float]


class StateWriter(Protocol):
    """Writer of what learning needs to go on, behind the commit of the policy. Every rank has one.

    One that also has a method ``copied`` is asked it where the process may get the next update: see
    :class:`CopyingWriter`.
    """

    def detach(self) -> bool:
        """Copy this rank's part to the host's memory, if it has room for it, and give the devices back.

        Returns:
            Whether another job may use the devices now; else they are in use until this process ends. The
            same on every rank.
        """

    def write(self, is_wanted: bool) -> tuple[FileEntry, ...]:
        """Write this rank's part durably, under this attempt's own names.

        Args:
            is_wanted: on the first rank, whether this attempt's policy was committed. If not, all ranks
                remove what they wrote.

        Returns:
            The files of all ranks, on the first rank; nothing on the others, and where not wanted.
        """


@runtime_checkable
class CopyingWriter(StateWriter, Protocol):
    """Writer that may write in a thread while the next update changes what it was made of."""

    def copied(self, is_wanted: bool) -> float | None:
        """Copy this rank's part, if every rank wants that and has room for it: :meth:`write` writes the copy.

        Returns:
            Bytes of this rank's copy; None, on every rank, where nothing was copied.
        """


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
    stays: bool = False
    """Whether this process may get another task of its stage afterwards, so that it keeps what it has
    loaded."""
    lineage: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the inputs read so far, by task key; they become the record's inputs."""
    compute_seconds: float = 0.0
    first_compute: float | None = None
    """Unix time at which a model began to compute; None before, and in tasks without a model."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    state_writer: StateWriter | None = None
    """Writer of what the stage still has to write once its result is committed, set by the stage."""
    skips_state: bool = False
    """Whether a trainer that keeps a state writes none this time (:attr:`Record.skips_state`)."""
    hashes: Callable[[int, FileEntry], bool] = lambda index, entry: True
    """Whether this rank hashes a file of a directory that is read, by its place among them: each file is
    hashed by one rank."""
    agree: Callable[[str | None], str | None] = lambda problem: problem
    """Returns the problem of the first rank that has one. All ranks read the same directories in turn."""
    _prepared: Record | None = field(default=None, init=False)
    """Prepare's record, which a task asks for again and again. A copy of a context may be of another run."""
    _rendering: Rendering | None = field(default=None, init=False)
    _policies: dict[Task, str] = field(default_factory=dict, init=False)
    """Fingerprints of policies that responses are of, as they are committed now."""

    @property
    def files(self) -> TaskPaths:
        return self.paths.task(self.task)

    @property
    def plan(self) -> Plan:
        """Plan of the run, by the task's configuration."""
        parent = read_identity(self.paths).parent
        return Plan.of(self.config, parent.iteration if parent else 0)

    @property
    def rendering(self) -> Rendering:
        """What chat templates are given besides messages and tools: the time when the run was made, and the
        arguments of the policy's."""
        if self._rendering is None:
            made = read_identity(self.paths).created
            self._rendering = Rendering(made, self.config.model.chat_template_arguments)
        return self._rendering

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
        """Return the record of an input, and note it as lineage.

        Raises:
            NotCommitted, CorruptData: there is none, or it cannot be read.
            StaleData: it was computed from something else than what this task has read before.
        """
        if task == PREPARE and self._prepared is not None:
            return self._prepared
        record = require_record(self.paths, task)
        for key, fingerprint in record.inputs.items():
            if self.lineage.get(key, fingerprint) != fingerprint:
                raise StaleData(task, f"it was computed from another result of {key} than is committed now")
        is_learned = (self.task.stage, task.stage) == (Stage.UPDATE, Stage.ROLLOUT)
        if is_learned and self.config.rollout.staleness:
            self._check_policy_of(record)
        self.lineage[task_key(task)] = record.fingerprint
        self._prepared = record if task == PREPARE else self._prepared
        return record

    def _check_policy_of(self, rollout: Record) -> None:
        """Check that responses are of the policy that is committed now, where that is none of the task's own
        inputs: it may have been made again since. Raises StaleData."""
        maker = policy_maker(rollout.policy_version)
        read = rollout.inputs.get(task_key(maker))
        if read is None or task_key(maker) in self.lineage:
            return
        if maker not in self._policies:
            self._policies[maker] = require_record(self.paths, maker).fingerprint
        if read != self._policies[maker]:
            raise StaleData(rollout.task, f"it was computed from another {maker} than is committed now")

    def table(self, task: Task, schema: pa.Schema, part: str = "") -> pa.Table:
        """Return one Arrow file of an input, verified."""
        return read_shard(self.paths, self.read(task), schema, part)

    def batches(self, task: Task, schema: pa.Schema) -> Iterator[pa.Table]:
        """Return an input's Arrow file, verified, as tables of some of its rows each, which take less memory
        than all together."""
        return read_batches(self.paths, self.read(task), schema)

    def rows(self, task: Task, schema: pa.Schema, indices: Sequence[int]) -> pa.Table:
        """Return rows of an input's main Arrow file, in the order of ``indices``; only the chunks that hold
        them are read and verified, if the input was committed in chunks, else the whole file."""
        record = self.read(task)
        if record.find_output(LISTING, "json"):
            return read_rows(self.paths, record, schema, listed(self.json(task, LISTING)), indices)
        return take(read_shard(self.paths, record, schema), indices)

    def json(self, task: Task, part: str) -> dict[str, Any]:
        """Return one JSON file of an input, verified."""
        record = self.read(task)
        entry = record.output(part, "json")
        path = self.paths.root / entry.path
        try:
            text = read_shared(path)
        except FileNotFoundError:
            text = b""
        check_digest(record, entry, len(text), xxh3_128_hexdigest(text))
        content: dict[str, Any] = from_json(text)
        return content

    def source(self, directory: str) -> Path:
        """Return a model directory of the user's, after checking that it is as it was when the run began.

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

    def fingerprint_of(self, directory: str) -> str:
        """Return a fingerprint of a model directory of the user's, from the hashes that prepare recorded."""
        if self.task.stage is Stage.PREPARE:
            return f"{directory} {self.attempt}"
        files = ((Path(key.removeprefix("file:")), state) for key, state in self.read(PREPARE).inputs.items())
        lines = [
            f"{path.relative_to(directory)} {state.partition(':')[0]}"
            for path, state in files
            if path.is_relative_to(directory)
        ]
        return xxh3_128_hexdigest("\n".join(sorted(lines)).encode())

    def policy_files(self, version: int) -> PolicyFiles:
        """Return where a policy is, every file of it verified: a model, or an adapter and the model that it
        is for. Version 0 is the user's model."""
        given, folder = self.config.model.policy, self._directory(version, self.paths.policies)
        if folder is None:
            return PolicyFiles(self.source(given), weights=(self.fingerprint_of(given), ""))
        record = self.read(policy_maker(version))
        if record.is_adapter:
            both = (self.fingerprint_of(given), record.fingerprint)
            return PolicyFiles(self.source(given), folder / ADAPTER, both)
        return PolicyFiles(folder, weights=(record.fingerprint, ""))

    def policy_directory(self, version: int) -> Path:
        """Return the model directory of a policy as :meth:`policy_files` does, for trainers that train whole
        models.

        Raises:
            UserError: the policy is an adapter.
        """
        files = self.policy_files(version)
        if files.adapter is not None:
            raise UserError(
                f"policy {version} is an adapter for {files.base} (update.lora); take context.policy_files, "
                "or go on from an export of it in a new run"
            )
        return files.base

    def reference_of(self, iteration: int) -> int:
        """Return the version of the KL's reference in an iteration."""
        return self.plan.reference_of(iteration) if self.config.algorithm.kl.sync_interval else 0

    def reference_files(self, version: int) -> PolicyFiles:
        """Return where the KL's reference of a version is, as :meth:`policy_files`: the user's model for 0,
        else the average that was committed with the policy, or the policy itself."""
        given = self.config.model.reference or self.config.model.policy
        if version == 0:
            return PolicyFiles(self.source(given), weights=(self.fingerprint_of(given), ""))
        is_average = self.config.algorithm.kl.averages
        if is_average and (folder := self._directory(version, self.paths.references)):
            return PolicyFiles(folder, weights=(self.read(policy_maker(version)).fingerprint, "average"))
        return self.policy_files(version)

    def newest_state(self, version: int) -> int:
        """Return the newest version, at most ``version``, that has a trainer's state which was not pruned;
        0 needs none.

        Iterations after it, up to ``version``, have to be learnt again from their shards, which gives the
        state that was lost. Raises as :meth:`read`; CorruptData for a state's record too, so that it is moved
        aside; UserError where a fork's first state is gone.
        """
        background.finish()  # what this process still writes may be the newest
        parent = load_run(self.paths.root).identity.parent
        first = parent.iteration if parent else 0
        while version > 0:
            self.read(policy_maker(version))
            if state_record(self.paths, version) is not None:
                break
            if version == first:
                raise UserError(
                    f"the trainer's state of iteration {version}, with which the run was forked, is gone; "
                    "nothing of the run can make it again: put it back from the parent, or fork again"
                )
            version -= 1
        return version

    def state_directory(self, version: int) -> Path | None:
        """Return the directory of a trainer's state that was committed behind its policy, every file of it
        verified; None for version 0 and where the policy's commit holds it."""
        if version == 0 or self.read(policy_maker(version)).holds_state:
            return None
        return self._committed_folder(self.read(state_of(version)), self.paths.states)

    def critic_directory(self, version: int) -> Path | None:
        """Return the directory of a critic that was committed with its policy; None where there is none, as
        for version 0, which starts from the configuration."""
        return self._directory(version, self.paths.critics)

    def trainer_directory(self, version: int) -> Path | None:
        """Return the directory of a trainer's state that was committed with its policy; None where there is
        none."""
        return self._directory(version, self.paths.trainers)

    def _directory(self, version: int, parent: Path) -> Path | None:
        """Return a directory that an update committed, its files verified; None where it committed none.
        Raises Thinned where retention removed it."""
        record = self.read(policy_maker(version))
        names = {entry.folder.split("/")[0] for entry in record.outputs}
        return self._committed_folder(record, parent) if parent.name in names else None

    def _committed_folder(self, record: Record, parent: Path) -> Path:
        check_is_kept(self.paths, record, parent.name)
        found = [e for e in record.outputs if (self.paths.root / e.path).is_relative_to(parent)]
        if problem := self.agree(self._problem_of(record, found)):
            raise CorruptData(record.task, problem)
        folders = {self.paths.root / entry.folder for entry in found}
        assert len(folders) == 1, f"{record.task} committed {folders}"
        return folders.pop()

    def _problem_of(self, record: Record, entries: Sequence[FileEntry]) -> str | None:
        """Return in words what is wrong with files of a commit, as far as this rank looks at them."""
        # every element of a node reads the policy; ranks share out what they hash
        mine = [entry for index, entry in enumerate(entries) if self.hashes(index, entry)]
        is_whole = len(mine) == len(entries)
        verify = verify_once if is_whole and record.task.stage is Stage.UPDATE else verify_files
        try:
            check_sizes(self.paths, record)
            verify(self.paths, record, mine)
        except CorruptData as error:
            return error.why
        return None
