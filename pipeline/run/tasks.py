"""The vocabulary of work: stage, task, policy version. Pure values, imported by everything."""

import re
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from pipeline.config.job_kinds import parts_of

JOB_KIND_PATTERN = r"[a-z]+(?:-[a-z][a-z0-9_]*)?"
"""Pattern of a task's or driver job's kind: at most one dash, then a pool's name that starts with a-z."""


class Stage(StrEnum):
    """Kind of work that a task does, in the order of an iteration."""

    PREPARE = "prepare"
    """Check and tokenisation of the prompts, and measurement of reward normalisation, once per run."""
    ROLLOUT = "rollout"
    """Generation of responses with the current policy."""
    SCORE = "score"
    """Scoring of responses with the components of one pool."""
    REWARD = "reward"
    """Scoring of responses with the other components, sum over all of them, and the reference's
    log-probabilities."""
    UPDATE = "update"
    """Training of policy and critic on the scored responses; commits the policy."""
    STATE = "state"
    """What learning needs to go on (critic, moments, counters): a cache, committed by the update's attempt
    behind its policy. No plan has it, and no task of its own makes it."""
    EVALUATE = "evaluate"
    """Generation on held-out prompts, and scoring."""
    BENCHMARK = "benchmark"
    """Measurement of a policy by a program of the user's (evaluate.command). Nothing waits for it, and a run
    goes on without its numbers."""

    @property
    def is_sharded(self) -> bool:
        """Whether an iteration has one task of this stage per shard (and pool)."""
        return self in (Stage.ROLLOUT, Stage.SCORE, Stage.REWARD)

    @property
    def has_packed_data(self) -> bool:
        """Whether data files of its tasks may be in their iteration's archive."""
        return self.is_sharded or self is Stage.UPDATE

    @property
    def generates(self) -> bool:
        """Whether its tasks generate responses: they stop when they are warned, with their progress saved."""
        return self in (Stage.ROLLOUT, Stage.EVALUATE)

    @property
    def heeds_warnings(self) -> bool:
        """Whether its tasks note signals that their process will be ended, and act on them."""
        return self.generates or self is Stage.BENCHMARK

    @property
    def is_expendable(self) -> bool:
        """Whether a run goes on, and is complete, although a task of this stage could not be done."""
        return self is Stage.BENCHMARK

    @property
    def scores(self) -> bool:
        """Whether its tasks score the responses of a shard."""
        return self in (Stage.SCORE, Stage.REWARD)

    @property
    def position(self) -> int:
        """Place in the order of an iteration: no task reads what a later stage makes."""
        return _POSITIONS[self]


_POSITIONS = {stage: position for position, stage in enumerate(Stage)}
WORK_STAGES = tuple(stage for stage in Stage if stage is not Stage.STATE)
"""Stages whose tasks a plan has."""


class Task(NamedTuple):
    """One unit of work. ``iteration`` is 1-based; 0 holds what happens before the first iteration."""

    iteration: int
    stage: Stage
    shard: int = 0
    pool: str = ""
    """Pool whose components a score task uses (``reward.components.NAME.pool``). Empty in other stages."""

    @property
    def job_kind(self) -> str:
        """Stage, with the pool's name if there is one, e.g. ``score-big``: names folders, arrays and rows."""
        return _job_kind(self.stage, self.pool)

    @property
    def file_stem(self) -> str:
        return "prompts" if self.stage is Stage.PREPARE else f"shard-{self.shard:05d}"

    @property
    def record_name(self) -> str:
        """File name of the commit record."""
        return f"{self.file_stem}.json"

    def __str__(self) -> str:
        if self.stage is Stage.PREPARE:
            return "prepare"
        shard = f" shard {self.shard}" if self.stage.is_sharded else ""
        return f"iteration {self.iteration} {self.job_kind}{shard}"


@lru_cache(maxsize=64)
def _job_kind(stage: Stage, pool: str) -> str:
    """Join what :func:`_stage_and_pool` splits; cached, as a pass asks for each of its tasks many times."""
    return f"{stage}-{pool}" if pool else str(stage)


PREPARE = Task(0, Stage.PREPARE)


def parse_task(text: str) -> Task:
    """Parse a task key; the inverse of :func:`task_key`.

    Raises:
        ValueError: the text is not a task key.
    """
    try:
        iteration, job_kind, shard = text.split("/")
        return task_of(int(iteration), job_kind, int(shard))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a task key such as '7/rollout/3'") from error


def task_key(task: Task) -> str:
    """Return the task as records and events name it, e.g. ``7/rollout/3`` or ``7/score-big/3``."""
    return f"{task.iteration}/{task.job_kind}/{task.shard}"


def task_of(iteration: int, job_kind: str, shard: int = 0) -> Task:
    """Return the task with this :attr:`Task.job_kind`.

    Raises:
        ValueError: it is none: no such stage, a pool where the stage has none, or none where it has.
    """
    stage, pool = _stage_and_pool(job_kind)
    return Task(iteration, stage, shard, pool)


def is_sharded(job_kind: str) -> bool:
    """Whether a job kind has many tasks in an iteration; an unknown one, of another version, has not."""
    return parts_of(job_kind)[0] in [stage for stage in Stage if stage.is_sharded]


@lru_cache(maxsize=64)
def _stage_and_pool(job_kind: str) -> tuple[Stage, str]:
    """Split a job kind; cached, as a submission of thousands of shards asks for each. Raises ValueError."""
    name, pool = parts_of(job_kind)
    stage = Stage(name)
    if not re.fullmatch(JOB_KIND_PATTERN, job_kind) or bool(pool) != (stage is Stage.SCORE):
        raise ValueError(f"{job_kind!r} is not a stage such as 'rollout' or 'score-POOL'")
    return stage, pool


URGENCY = {
    Stage.PREPARE: 0,
    Stage.UPDATE: 1,
    Stage.REWARD: 2,
    Stage.SCORE: 3,
    Stage.ROLLOUT: 4,
    Stage.EVALUATE: 4,
    Stage.BENCHMARK: 5,
}
"""Priority of each stage where slots are few, lowest first: the one that shortens the run most goes first.
Evaluation delays nothing: it comes after the rollouts that are launched with it, but before those of the next
iteration."""
