"""Disk space that a run needs, by its configuration and its models' file headers; and what is free."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.algorithm import Estimator
from pipeline.config.issue import ConfigError, ConfigIssue
from pipeline.config.model_files import BadModel, Tensor, read_header
from pipeline.config.schema import Config
from pipeline.config.update import LoraConfig, Precision, TrainingEngine, UpdateConfig
from pipeline.run.log_packing import MANY
from pipeline.text import size

_BYTES = {Precision.FP32: 4, Precision.BF16: 2, Precision.FP16: 2}
_FP32 = 4
_MOMENTS = 2
_TOKEN_BYTES = 24
"""Bytes on disk for a token: id, mask, two log-probabilities, and its text twice."""
_FILES_OF_STATE = 12
"""Files of a policy, critic or trainer state: weights, settings, tokenizer."""
_FILES_OF_ITERATION = 45
"""Files and folders of an iteration beside those of its shards: update, evaluation, row, submissions, their
logs."""
FILES_OF_PACKED = 20
"""Most files and folders of an iteration that is packed."""


@dataclass(frozen=True)
class Footprint:
    """Size on disk, in bytes and files."""

    num_bytes: int
    files: int

    def times(self, factor: int) -> "Footprint":
        return Footprint(self.num_bytes * factor, self.files * factor)

    def plus(self, other: "Footprint") -> "Footprint":
        return Footprint(self.num_bytes + other.num_bytes, self.files + other.files)


def check_disk(config: Config, start: int = 0) -> Iterator[str]:
    """Compare what the run writes with what is free in its place. Yields lines for people.

    Args:
        start: number of iterations that a fork has from its parent.

    Raises:
        ConfigError: policies, critics and trainer states alone do not fit. Shards are never a reason, as
            responses may be shorter than the longest.
    """
    update, iterations = config.update, config.iterations - start
    state, shards = imagine(config)
    kept = states_kept(iterations, update.keep_last, update.keep_every)
    needed, most = state.times(kept).num_bytes, shards.times(iterations).num_bytes
    free, _ = room(existing_folder(Path(config.run_dir)))
    told = f"{size(needed)} of policies, critics and trainer states ({kept} x {size(state.num_bytes)})"
    if needed > free:
        why = f"needs {told}, and only {size(free)} are free there; {_way_out(update)}"
        raise ConfigError(str(ConfigIssue("run_dir", config.run_dir, why)))
    if needed + most > free:
        yield f"warning: run_dir: with the longest responses the disk would be full; {_way_out(update)}"
    yield f"disk: {told}, at most {size(most)} of shards; {size(free)} are free"


def _way_out(update: UpdateConfig) -> str:
    fewer = []
    if update.keep_last is None or update.keep_last > 2:
        fewer.append("update.keep_last=2")
    if update.keep_every is not None:
        fewer.append("update.keep_every=null")
    keep = f"keep fewer ({' '.join(fewer)}), or " if fewer else "train adapters only (update.lora), or "
    return f"{keep}give run_dir another place"


def existing_folder(path: Path) -> Path:
    """Return the path or its nearest parent that exists, on whose filesystem it will be."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def room(folder: Path) -> tuple[int, int | None]:
    """Return bytes and inodes that are free for this user; None where the filesystem counts no inodes."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def states_kept(iterations: int, keep_last: int | None, keep_every: int | None) -> int:
    """Return the largest number of states that are on disk at once. Pure."""
    if keep_last is None:
        return iterations
    before = max(0, iterations - keep_last - 1)  # the newest is written before the oldest goes
    return min(iterations, keep_last + 1 + (before // keep_every if keep_every else 0))


def imagine(config: Config) -> tuple[Footprint, Footprint]:
    """Estimate an iteration's state and shards, from the models' weights and the longest responses.

    With update.lora the policy that is committed is the adapter, in fp32.
    """
    update = config.update
    policy = num_parameters(Path(config.model.policy))
    has_critic = config.algorithm.estimator is Estimator.GAE
    critic = num_parameters(Path(config.model.critic or config.model.policy)) if has_critic else 0
    copies = _MOMENTS + (update.precision is not Precision.FP32)
    state = (policy + critic) * (_BYTES[update.precision] + _FP32 * copies)
    if update.lora is not None:
        adapter = num_adapted(Path(config.model.policy), update.lora)
        state = critic * (_BYTES[update.precision] + _FP32 * copies) + adapter * _FP32 * (2 + _MOMENTS)
    if update.engine != TrainingEngine.DEEPSPEED:
        # Nobody knows what else a trainer of the user's keeps, and it writes whole models.
        state = (policy + critic) * _BYTES[update.precision]
    tokens = (config.model.context_length or 0) * config.responses_per_iteration
    files = files_of(config.rollout.num_shards * (2 + len(config.reward.pools)))
    return Footprint(state, 3 * _FILES_OF_STATE), Footprint(tokens * _TOKEN_BYTES, files)


def files_of(tasks: int) -> int:
    """Return the files and folders of an iteration that is not packed, but for policy and trainer's state.
    Pure.

    Args:
        tasks: number of its tasks that each do a shard: their data, records and, where they are few, logs.
    """
    return tasks * (2 if tasks >= MANY else 3) + _FILES_OF_ITERATION


def num_parameters(folder: Path) -> int:
    """Count the parameters in a model directory, by the headers of its weight files. Raises ConfigError."""
    return sum(math.prod(tensor.shape) for _, tensor in _tensors(folder))


def num_adapted(folder: Path, lora: LoraConfig) -> int:
    """Count the parameters of low-rank adapters, one for each matrix of a numbered layer that
    ``target_modules`` names. Raises ConfigError."""
    wanted = lora.target_modules
    ends = () if isinstance(wanted, str) else tuple(f".{target}" for target in wanted)
    total = 0
    for name, tensor in _tensors(folder):
        module = f".{name.removesuffix('.weight')}"
        is_linear = len(tensor.shape) == 2 and any(part.isdigit() for part in module.split("."))
        if is_linear and (isinstance(wanted, str) or module.endswith(ends)):
            total += lora.rank * sum(tensor.shape)
    return total


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = list(folder.glob("model*.safetensors")) or list(folder.glob("*.safetensors"))
    try:
        for file in files:
            yield from read_header(file).items()
    except BadModel as error:
        raise ConfigError(f"{folder}: {error}") from error
