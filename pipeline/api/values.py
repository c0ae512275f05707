"""What an opened run answers with. Frozen dataclasses; times are unix times in seconds."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.metrics.samples import Choice, Sample

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Damage:
    """Something of a run that was committed and cannot be read."""

    what: str
    """The task that made it, e.g. ``iteration 3 reward shard 1``."""
    why: str
    """What is wrong, with the file's name."""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands."""

    state: str
    """complete, running, failed or incomplete; of a run on Slurm also cancelled, paused (its jobs were
    cancelled by hand), stopped (nothing is in the queue) or unknown (Slurm does not answer here)."""
    iterations_done: int
    """Iterations that are done; of a fork including its parent's."""
    iterations: int
    """Iterations that the run will have."""
    evaluations_done: int
    evaluations: int
    """Evaluations that the run will have."""
    details: Mapping[str, Any]
    """Everything that ``slurm-ppo status --json`` prints, by the same keys."""


@dataclass(frozen=True)
class Samples:
    """Responses of an iteration, with their scores, and what could not be read of it."""

    iteration: int
    """Iteration that made them. Policy ``iteration - 1`` wrote them."""
    rows: tuple[Sample, ...]
    """Responses, without greedy ones: chosen ones in the order of the choice, else by shard and row."""
    choices: tuple[Choice | None, ...]
    """Reason why each of ``rows`` was chosen; None where all are given."""
    num_scored: int
    """Responses of the iteration that have a reward and can be read, chosen or not."""
    reward_mean: float | None
    """Mean reward of these; None where there are none."""
    damage: tuple[Damage, ...] = ()
    """Shards that are left out because they cannot be read."""
    num_pending: int = 0
    """Shards that are not scored yet."""

    def table(self) -> "pa.Table":
        """Return the rows as an Arrow table: a column for each attribute of ``Sample``, ``reward/NAME`` for
        each component of the reward, and ``choice``. ``turns`` are lists of structs ``role``, ``text``."""
        from pipeline.api.tables import sample_table

        return sample_table(self.rows, self.choices)


@dataclass(frozen=True)
class TaskFile:
    """A file that a task committed."""

    path: str
    """Path relative to the run directory; of a packed iteration a member of its ``shards.zip``."""
    bytes: int
    xxh3_128: str
    """Hash of the content."""


@dataclass(frozen=True)
class TaskRecord:
    """The commit record of a task: who computed what, where, when, from which seed."""

    iteration: int
    stage: str
    """prepare, rollout, score, reward, update, state (what learning goes on from) or evaluate."""
    shard: int
    pool: str
    """Pool of reward components, of stage score; empty in others."""
    attempt: str
    """Id of the attempt that won."""
    policy_version: int
    """Version of the policy that was used; of an update, of the one it made."""
    seed: int
    rows: int
    started: float
    ended: float
    host: str
    job_id: str
    """Slurm's id of the job; empty for a process of one machine."""
    metrics: Mapping[str, float]
    """Numbers that the task measured; rows of metrics.jsonl are made of them."""
    files: tuple[TaskFile, ...]

    @property
    def seconds(self) -> float:
        """Seconds from the attempt's start to its commit."""
        return self.ended - self.started


@dataclass(frozen=True)
class TaskRecords:
    """Commit records of an iteration's tasks."""

    iteration: int
    rows: tuple[TaskRecord, ...]
    """Records, inputs before what reads them."""
    damage: tuple[Damage, ...]
    """Tasks whose record, or a file that it names, is gone or not as it was committed, by size."""
    missing: tuple[str, ...]
    """Tasks that are not committed."""


@dataclass(frozen=True)
class Policy:
    """A committed policy that was kept."""

    version: int
    """0 is the model that the run began with."""
    path: Path
    """Model directory, as transformers loads it; with ``is_adapter`` one whose ``adapter`` peft loads."""
    is_adapter: bool
    """Whether it holds an adapter instead of a model; ``slurm-ppo export`` makes a whole model of one."""
    reward: float | None
    """Mean reward on held-out prompts; None where it was not evaluated."""
    is_best: bool
    """Whether it is the best of the run so far, by ``evaluate.best`` and ``evaluate.best_is``."""
    damage: Damage | None = None
    """What is wrong with its files, by their sizes."""
