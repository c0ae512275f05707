"""The vocabulary of work: stage, task, policy version. Pure values, imported by everything."""

from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """What a task computes."""

    PREPARE = "prepare"
    """Once per run: check and tokenise the prompts, measure reward normalisation."""
    ROLLOUT = "rollout"
    """Generate responses with the current policy."""
    REWARD = "reward"
    """Score responses and compute the reference model's log-probabilities."""
    UPDATE = "update"
    """Train policy and critic on the scored responses."""
    EVALUATE = "evaluate"
    """Generate greedily on held-out prompts and score."""

    @property
    def is_sharded(self) -> bool:
        """Whether an iteration has one task of this stage per shard."""
        return self in (Stage.ROLLOUT, Stage.REWARD)


@dataclass(frozen=True, order=True)
class Task:
    """One unit of work. ``iteration`` is 1-based; 0 holds what happens before the first iteration."""

    iteration: int
    stage: Stage
    shard: int = 0

    @property
    def file_stem(self) -> str:
        return "prompts" if self.stage is Stage.PREPARE else f"shard-{self.shard:05d}"

    def __str__(self) -> str:
        if self.stage is Stage.PREPARE:
            return "prepare"
        shard = f" shard {self.shard}" if self.stage.is_sharded else ""
        return f"iteration {self.iteration} {self.stage}{shard}"


PREPARE = Task(0, Stage.PREPARE)


def parse_task(text: str) -> Task:
    """Inverse of :func:`task_key`.

    Raises:
        ValueError: the text is not a task key.
    """
    try:
        iteration, stage, shard = text.split("/")
        return Task(int(iteration), Stage(stage), int(shard))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a task key such as '7/rollout/3'") from error


def task_key(task: Task) -> str:
    """The task as records and events name it, e.g. ``7/rollout/3``."""
    return f"{task.iteration}/{task.stage}/{task.shard}"
