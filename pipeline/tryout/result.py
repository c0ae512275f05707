"""What a small run shows, read from its commits: prompts, responses, seconds, tokens and memory."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from pipeline.config.reward import RuleConfig
from pipeline.config.scheduler import resources_of
from pipeline.config.schema import Config
from pipeline.metrics.responses import read_samples
from pipeline.metrics.samples import Sample
from pipeline.run.commits import Record
from pipeline.run.directory import Run
from pipeline.run.records import Records
from pipeline.run.schemas import ROLLOUT, FinishReason
from pipeline.run.shards import read_shard
from pipeline.run.tasks import PREPARE, Stage, Task

_PART = "seconds/update/"


@dataclass(frozen=True)
class TriedStage:
    """One task of a small run."""

    job_kind: str
    seconds: float
    """Wall seconds from its start to its commit."""
    start: float
    """Part of them before a model computed: reading, imports, loading; 0 where none computes."""
    compute: float
    """Part of them in which a model computed."""
    tokens: float
    """Response tokens that it made or read."""
    memory_gib: float
    """Peak memory of its process; of several ranks, of the first."""
    gpu_memory_gib: float | None = None
    halvings: int = 0
    """Times that its batch budget was halved, as GPU memory did not suffice."""
    host: str = ""
    partition: str = ""
    """Partitions that its job asked for, on Slurm; empty for the default one, and elsewhere."""

    @property
    def other(self) -> float:
        """Seconds in which no model computed, after the first did: rules, writing, hashing."""
        return max(0.0, self.seconds - self.start - self.compute)

    @property
    def tokens_per_second(self) -> float | None:
        """Response tokens by second of compute; None where no model computed."""
        return self.tokens / self.compute if self.tokens and self.compute else None


@dataclass(frozen=True)
class Lengths:
    """Median, 95th percentile and maximum of lengths in tokens."""

    median: int
    most: int
    longest: int

    @staticmethod
    def of(lengths: Sequence[int]) -> "Lengths":
        """Return those of at least one length: each is one that there is."""
        ranked = sorted(lengths)
        median, most = (ranked[-(-len(ranked) * percent // 100) - 1] for percent in (50, 95))
        return Lengths(median, most, ranked[-1])


@dataclass(frozen=True)
class TryResult:
    """Results of a small run."""

    config: Config
    """Configuration of the run that is to come."""
    prompts: int
    """Number of prompts that were tried."""
    samples: tuple[Sample, ...]
    """Responses, those of a prompt side by side."""
    prompt_lengths: Mapping[str, int]
    """Tokens of each prompt, by its id."""
    stages: tuple[TriedStage, ...]
    """Tasks, in the order of an iteration, prepare first."""
    minibatches: int = 1
    """Mini-batches of the small run's update."""
    update: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the update by their names in rows, such as ``seconds/update/steps``."""

    @property
    def groups(self) -> list[list[Sample]]:
        """Responses by prompt."""
        return [list(group) for _, group in groupby(self.samples, key=lambda sample: sample.prompt_id)]

    @property
    def num_flat(self) -> int | None:
        """Prompts whose responses all have the same reward; None where each has one response."""
        if self.config.rollout.samples_per_prompt < 2:
            return None
        return sum(len(set(known_rewards(group))) == 1 for group in self.groups)

    @property
    def is_solvable(self) -> bool:
        """Whether a reward says that a response is right: where rules alone give it."""
        components = self.config.reward.components.values()
        return bool(components) and all(isinstance(one, RuleConfig) for one in components)

    @property
    def num_solved(self) -> int:
        """Responses with a reward of ``evaluate.solved_at`` or more."""
        return sum(sample.reward >= self.config.evaluate.solved_at for sample in self.samples)

    def num_ended(self, reason: FinishReason) -> int:
        """Responses that ended for a reason."""
        return sum(sample.finish_reason == reason for sample in self.samples)

    @property
    def response_lengths(self) -> Lengths:
        return Lengths.of([sample.length for sample in self.samples])

    def stage(self, job_kind: str) -> TriedStage:
        return next(one for one in self.stages if one.job_kind == job_kind)

    @property
    def update_parts(self) -> dict[str, float]:
        """Seconds of the parts of the update."""
        return {
            name.removeprefix(_PART): seconds
            for name, seconds in self.update.items()
            if name.startswith(_PART)
        }


def known_rewards(samples: Sequence[Sample]) -> list[float]:
    """Return the rewards of responses that have one."""
    return [sample.reward for sample in samples if not math.isnan(sample.reward)]


def read_result(run: Run, config: Config) -> TryResult:
    """Read what a small run has committed.

    Args:
        config: the configuration of the run that is to come.

    Raises:
        BadCommit: a file is not what was committed.
    """
    records = Records(run.paths)
    tasks = (PREPARE, *run.plan.tasks(1))
    records.refresh(tasks)
    rollout = records.known[Task(1, Stage.ROLLOUT)]
    return TryResult(
        config=config,
        prompts=run.config.data.prompts_per_iteration,
        samples=read_samples(run, 1).rows,
        prompt_lengths=dict(_prompt_lengths(run, rollout)),
        stages=tuple(
            replace(stage_of(records.known[task]), partition=_partition(config, task)) for task in tasks
        ),
        minibatches=run.config.update.minibatches,
        update=records.known[Task(1, Stage.UPDATE)].metrics,
    )


def _prompt_lengths(run: Run, rollout: Record) -> Iterator[tuple[str, int]]:
    rows = read_shard(run.paths, rollout, ROLLOUT)
    for prompt_id, tokens in zip(rows["prompt_id"].to_pylist(), rows["prompt_tokens"], strict=True):
        yield prompt_id, len(tokens)


def _partition(config: Config, task: Task) -> str:
    return ",".join(resources_of(config.slurm, task.job_kind).partition) if config.slurm else ""


def stage_of(record: Record) -> TriedStage:
    """Return what a task's commit record says of its time and memory."""
    metrics = record.metrics
    return TriedStage(
        job_kind=record.task.job_kind,
        seconds=record.seconds,
        start=metrics.get("startup_seconds", 0.0),
        compute=metrics["compute_seconds"],
        tokens=metrics.get("response_tokens", 0.0),
        memory_gib=metrics["peak_memory_gib"],
        gpu_memory_gib=metrics.get("peak_gpu_memory_gib"),
        halvings=record.halvings,
        host=record.host,
    )
