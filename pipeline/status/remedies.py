"""What to type after a failure that ended a run: the setting that helps, with its value, in a whole command.

Only :func:`command` reads the run's directory. The numbers follow from the settings and from the number of
the attempt: each try of a task gets more of what the one before lacked (:mod:`pipeline.decide.escalating`).
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config.allocation import DrivenConfig
from pipeline.config.engines import VllmConfig
from pipeline.config.scheduler import key_of, resources_of
from pipeline.config.schema import Config
from pipeline.decide.escalating import MORE_MEMORY, MORE_TIME
from pipeline.run.directory import Run, resume_command
from pipeline.run.failures import FailureKind
from pipeline.run.forking import fork_command, nearest_parent
from pipeline.run.tasks import Stage, parse_task
from slurm.limits import format_duration, parse_duration, parse_memory

_GPU_SHARE, _LARGEST_GPU_SHARE, _STEP = 0.9, 0.95, 0.1
"""vLLM's default share of a card, the largest one to try, and by how much less is tried."""
_KV_CACHE = "KV cache"


@dataclass(frozen=True)
class Remedy:
    """A setting that helps."""

    words: tuple[str, ...]
    """As typed: KEY=VALUE."""
    what: str
    """What it does, to be read after ``with``."""
    is_fork: bool = False
    """Whether the run's numbers depend on it, so that a fork has to have it."""


@dataclass(frozen=True)
class GivenUp:
    """The last attempt at a task that was given up."""

    job_kind: str
    """Its stage, or ``score-POOL``."""
    kind: FailureKind
    attempt: int
    """From 1."""
    node: str
    """Empty if unknown."""
    message: str


def remedy(config: Config, failed: GivenUp) -> Remedy | None:
    """Return what helps a task that was given up, None where no setting does. Pure."""
    match failed.kind:
        case FailureKind.TIMEOUT:
            return _more_time(config, failed)
        case FailureKind.MEMORY:
            return _more_memory(config, failed)
        case FailureKind.DEVICE | FailureKind.LOST:
            return _other_nodes(config, failed)
        case FailureKind.DEVICE_MEMORY:
            return _less_at_once(config, failed)
        case FailureKind.NUMERICS:
            rate = config.update.learning_rate / 2
            return Remedy((f"update.learning_rate={rate:g}",), "half of the learning rate", is_fork=True)
        case FailureKind.CONFIG | FailureKind.ERROR if _KV_CACHE in failed.message:
            return _larger_cache(config, failed)
        case _:
            return None


def command(run: Run, failed: GivenUp) -> str:
    """Return how to go on after a failure, with the whole command; empty where no setting is known to help,
    or nothing can be forked."""
    found = remedy(run.config, failed)
    if found is None:
        return ""
    if not found.is_fork:
        return f"with {found.what}: {resume_command(run)} {shlex.join(found.words)}"
    parent = nearest_parent(run, run.config.iterations)
    if parent is None:
        return ""
    return f"in a fork with {found.what}: {fork_command(run.paths.root, parent.number, found.words)}"


def after(run: Run, event: Mapping[str, Any]) -> str:
    """Return :func:`command` for an event ``failed`` of the journal."""
    try:
        failed = GivenUp(
            parse_task(event["task"]).job_kind,
            FailureKind(event["kind"]),
            int(event["attempt"]),
            str(event.get("node") or ""),
            str(event["message"]),
        )
    except (KeyError, TypeError, ValueError):  # a line of another version's, or damaged
        return ""
    return command(run, failed)


def _more_time(config: Config, failed: GivenUp) -> Remedy | None:
    """Twice the time of the last try."""
    if isinstance(config.scheduler, DrivenConfig):
        return Remedy((f"scheduler.time_limit={2 * config.scheduler.time_limit}",), "twice the time")
    if config.slurm is None:
        return None
    given = resources_of(config.slurm, failed.job_kind)
    name, text = ("task_time", given.task_time) if given.task_time else ("time", given.time)
    seconds = parse_duration(text)
    if seconds is None:
        return None
    longer = seconds * 2 * MORE_TIME ** (failed.attempt - 1)
    return Remedy((f"{key_of(failed.job_kind)}.{name}={format_duration(longer)}",), "more time")


def _more_memory(config: Config, failed: GivenUp) -> Remedy | None:
    """Twice the memory of the last try, which had more than the first one."""
    if config.slurm is None or (given := resources_of(config.slurm, failed.job_kind)).mem is None:
        return None
    larger = parse_memory(given.mem) * MORE_MEMORY**failed.attempt
    return Remedy((f"{key_of(failed.job_kind)}.mem={math.ceil(larger)}M",), "more memory")


def _other_nodes(config: Config, failed: GivenUp) -> Remedy | None:
    if config.slurm is None or not failed.node:
        return None
    excluded = [*resources_of(config.slurm, failed.job_kind).exclude, failed.node]
    names = ",".join(dict.fromkeys(excluded))
    return Remedy((f"{key_of(failed.job_kind)}.exclude=[{names}]",), "other nodes")


def _less_at_once(config: Config, failed: GivenUp) -> Remedy | None:
    """Take less of a GPU's memory at once: vLLM's share of the card, or in a fork the tokens of a batch."""
    if failed.job_kind == Stage.UPDATE:
        less = config.update.tokens_per_micro_batch
        if less == "auto":
            return None
        words = (f"update.tokens_per_micro_batch={max(1, less // 2)}",)
        return Remedy(words, "half of the tokens at once", is_fork=True)
    if (found := _engine(config, failed.job_kind)) is None:
        return None
    key, given = found
    share = (given.gpu_memory_utilization or _GPU_SHARE) - _STEP
    return Remedy((f"{key}.gpu_memory_utilization={share:.2f}",), "a smaller share of the card")


def _larger_cache(config: Config, failed: GivenUp) -> Remedy | None:
    if (found := _engine(config, failed.job_kind)) is None:
        return None
    key, given = found
    if (given.gpu_memory_utilization or _GPU_SHARE) >= _LARGEST_GPU_SHARE:
        return None
    words = (f"{key}.gpu_memory_utilization={_LARGEST_GPU_SHARE}",)
    return Remedy(words, "a larger share of the card for the cache")


def _engine(config: Config, job_kind: str) -> tuple[str, VllmConfig] | None:
    """Return the key and settings of the vLLM engine that a stage uses; None where it uses none."""
    stage = Stage(job_kind.partition("-")[0])
    if stage in (Stage.ROLLOUT, Stage.EVALUATE) and config.rollout.engine == "vllm":
        return "rollout.vllm", config.rollout.vllm
    if stage in (Stage.REWARD, Stage.SCORE) and config.reward.engine == "vllm":
        return "reward.vllm", config.reward.vllm
    return None
