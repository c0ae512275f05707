"""How much disk a run still needs: from what its iterations took, or before the first from its models."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.commits import Record
from pipeline.config import Config
from pipeline.observe import Records, find_frontier
from pipeline.plan import policy_maker
from pipeline.runs import Run
from pipeline.tasks import Stage
from pipeline.updateconfig import Precision

_FP32 = 4
_MOMENTS = 2
_TOKEN_BYTES = 24
"""Of a response on disk: token, mask, two log-probabilities, and its text twice; the prompt is like it."""
_FILES_OF_STATE = 12
"""Of policy, critic and trainer state: weights, settings, tokenizer."""
_FILES_OF_TASK = 4
"""Data, record, log, what was submitted."""


@dataclass(frozen=True)
class Footprint:
    """Bytes and files."""

    num_bytes: int
    files: int

    def times(self, factor: int) -> "Footprint":
        return Footprint(self.num_bytes * factor, self.files * factor)

    def plus(self, other: "Footprint") -> "Footprint":
        return Footprint(self.num_bytes + other.num_bytes, self.files + other.files)


@dataclass(frozen=True)
class Estimate:
    """What a run will still write, net of what it will remove."""

    state: Footprint
    """Policy, critic and trainer state of one iteration."""
    shards: Footprint
    """Everything else of one iteration."""
    iterations_left: int
    states_more: int
    """States that will be there at most, more than now."""
    is_measured: bool
    """From an iteration that is done, not from the size of the models."""

    @property
    def needed(self) -> Footprint:
        return self.state.times(self.states_more).plus(self.shards.times(self.iterations_left))


def estimate(run: Run, exists: bool) -> Estimate:
    """Of a run on disk, or of one that would be made."""
    done = max(find_frontier(run.plan, run.paths).updated, run.plan.start) if exists else run.plan.start
    left = run.plan.iterations - done
    update = run.config.update
    kept_now = done - run.plan.start if update.keep_last is None else min(done, update.keep_last)
    most = states_kept(run.plan.iterations - run.plan.start, update.keep_last, update.keep_every)
    measured = measure(run, done) if done > run.plan.start else None
    state, shards = measured or imagine(run.config)
    more = max(0, most - kept_now) if left else 0
    return Estimate(state, shards, left, more, measured is not None)


def states_kept(iterations: int, keep_last: int | None, keep_every: int | None) -> int:
    """The most states that are on disk at once. Pure."""
    if keep_last is None:
        return iterations
    before = max(0, iterations - keep_last - 1)  # the newest is written before the oldest goes
    return min(iterations, keep_last + 1 + (before // keep_every if keep_every else 0))


def measure(run: Run, iteration: int) -> tuple[Footprint, Footprint] | None:
    """State and shards of an iteration that is done, by its commit records."""
    records = Records(run.paths)
    tasks = run.plan.tasks(iteration)
    records.refresh(tasks)
    found = [record for task in tasks if (record := records.readable(task))]
    update = next((record for record in found if record.task == policy_maker(iteration)), None)
    if update is None:
        return None
    others = [record for record in found if record.task.stage is not Stage.UPDATE]
    return footprint(update), Footprint(
        sum(footprint(record).num_bytes for record in others), _FILES_OF_TASK * len(tasks)
    )


def footprint(record: Record) -> Footprint:
    return Footprint(sum(entry.bytes for entry in record.outputs), len(record.outputs))


def imagine(config: Config) -> tuple[Footprint, Footprint]:
    """State and shards, from the models' weights and the longest responses."""
    policy = weights_of(Path(config.model.policy))
    critic = weights_of(Path(config.model.critic)) if config.model.critic else policy
    models = policy if config.algorithm.estimator.value != "gae" else policy.plus(critic)
    trained_share = 0.02 if config.update.lora else 1.0
    master = 0 if config.update.precision is Precision.FP32 else 1
    trainer = int(models.files * _FP32 * (_MOMENTS + master) * trained_share)
    tokens = (config.model.context_length or 0) * config.responses_per_iteration
    tasks = 2 * config.rollout.num_shards + config.rollout.num_shards * len(config.reward.pools) + 1
    return (
        Footprint(models.num_bytes + trainer, 3 * _FILES_OF_STATE),
        Footprint(tokens * _TOKEN_BYTES, _FILES_OF_TASK * tasks),
    )


def weights_of(folder: Path) -> Footprint:
    """Bytes of a model's weights; ``files``: how many weights there are."""
    sizes = [(path.stat().st_size, sum(parameters_in(path))) for path in folder.glob("*.safetensors")]
    return Footprint(sum(each for each, _ in sizes), sum(count for _, count in sizes))


def parameters_in(path: Path) -> Iterator[int]:
    """Of each tensor of a safetensors file, by its header."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for dimension in tensor["shape"]:
                count *= dimension
            yield count
