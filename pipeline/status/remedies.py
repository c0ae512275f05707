"""What to type after a failure that ended a run: the setting that helps, with its value, in a whole command.

Only :func:`command` reads the run's directory. The numbers follow from the settings and from the number of
the attempt: each try of a task gets more of what the one before lacked (:mod:`pipeline.decide.escalating`).
Jobs that Slurm refuses or holds are in :mod:`pipeline.status.obstacles`.
"""

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config.allocation import DrivenConfig
from pipeline.config.engine_rules import vllm_in
from pipeline.config.engines import Engine
from pipeline.config.scheduler import key_of, resources_of
from pipeline.config.schema import Config
from pipeline.decide.budgets import halved
from pipeline.decide.device_faults import DeviceFault, diagnose
from pipeline.decide.escalating import MORE_MEMORY, MORE_TIME
from pipeline.run.directory import Run, resume_command
from pipeline.run.engine_use import engines_of
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.forking import fork_command, nearest_parent
from pipeline.run.tasks import Stage, Task, parse_task
from pipeline.run.troubles import Trouble, outstanding
from pipeline.tracking.destination import Destination
from pipeline.tracking.state import sync_command
from slurm.limits import format_duration, parse_duration, parse_memory
from slurm.nodes import node_names

_LARGEST_GPU_SHARE, _STEP = 0.95, 0.1
"""vLLM's largest share of a card to try, and by how much less or more is tried."""
_IN_CODE = re.compile(r"\braised \w+: .* at (?P<place>/.+?:\d+)", re.DOTALL)
"""What plug-ins say of an exception (:func:`pipeline.plugins.interpreter.contract.raised`)."""
_OF_RANKS = {
    DeviceFault.NETWORK: (("NCCL_DEBUG", "INFO"), ("NCCL_IB_DISABLE", "1")),
    DeviceFault.NCCL: (("NCCL_DEBUG", "INFO"),),
    DeviceFault.WATCHDOG: (("NCCL_DEBUG", "INFO"),),
    DeviceFault.SHARED_MEMORY: (("NCCL_SHM_DISABLE", "1"),),
}
"""Environment variables of NCCL that help against a fault, those to try first before others."""
_FULL_DISK = re.compile(r"\[Errno (28|122)\]")
"""ENOSPC and EDQUOT, as Python writes them."""
_DOES = {
    "NCCL_DEBUG": "NCCL's own account in the log",
    "NCCL_IB_DISABLE": "TCP in the place of InfiniBand",
    "NCCL_SHM_DISABLE": "sockets in the place of /dev/shm",
}


@dataclass(frozen=True)
class Remedy:
    """What helps, with the setting for it."""

    words: tuple[str, ...]
    """As typed: KEY=VALUE; none where code has to change, and no setting."""
    what: str
    """What it does, to be read after ``with``."""
    is_fork: bool = False
    """Whether the run's numbers depend on it, so that a fork has to have it."""


def remedy(config: Config, failed: Failure) -> Remedy | None:
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
        case FailureKind.CONFIG | FailureKind.ERROR | FailureKind.KILLED:
            return _by_message(config, failed)
        case _:
            return None


def _by_message(config: Config, failed: Failure) -> Remedy | None:
    """Return what helps against an error that says itself what it is about: of a GPU, of NCCL, of code."""
    found = diagnose(failed.message)
    if found is not None and found.row.fault is DeviceFault.TOO_SMALL:
        return _larger_cache(config, failed)
    if found is not None and found.row.fault in _OF_RANKS:
        return _variable(config, failed, _OF_RANKS[found.row.fault])
    if place := _IN_CODE.search(failed.message):
        return Remedy((), f"{place['place']} repaired")
    return None


def command(run: Run, failed: Failure) -> str:
    """Return how to go on after a failure, with the whole command, or the setting where nothing can be
    forked; empty where none is known to help."""
    most = run.config.attempts_of(failed.task.job_kind)
    tries = min(failed.attempt, most)  # a person's resume begins with 1
    found = remedy(run.config, replace(failed, attempt=tries))
    if found is None:
        return ""
    if not found.is_fork:
        return f"with {found.what}: {' '.join([resume_command(run), *map(shlex.quote, found.words)])}"
    parent = nearest_parent(run, run.config.iterations)
    if parent is None:
        setting = " ".join(found.words)
        return f"in another run with {found.what}, as nothing can be forked yet: {setting}"
    return f"in a fork with {found.what}: {fork_command(run.paths.root, parent.number, found.words)}"


def after(run: Run, event: Mapping[str, Any]) -> str:
    """Return :func:`command` for an event ``failed`` of the journal."""
    try:
        task, kind, node = parse_task(event["task"]), FailureKind(event["kind"]), event.get("node") or ""
        failed = Failure(task, int(event["attempt"]), kind, str(event["message"]), node=str(node))
    except (KeyError, TypeError, ValueError):  # a line of another version's, or damaged
        return ""
    return command(run, failed)


def ways_around(run: Run, events: Sequence[Mapping[str, Any]], state: str) -> Iterator[str]:
    """Yield what to type against the troubles that the journal's end has.

    Args:
        state: of the run, as a status has it.
    """
    there = outstanding(events)
    is_full = any(_FULL_DISK.search(str(event.get("message", ""))) for event in there.values())
    if is_full and state != "complete":
        yield _with_room(run, state)
    for to in Destination:
        if Trouble(to) in there:
            yield f"to send the rows that {to.label} lacks: {sync_command(run, to)}"


def _with_room(run: Run, state: str) -> str:
    """Say how to make room: an active run is not cleaned, and goes on by itself."""
    place = run.paths.root
    if state in ("running", "unknown"):
        beside = shlex.quote(str(place.parent))
        return f"it goes on once there is room; to clean runs beside it: slurm-ppo clean {beside}"
    clean = f"slurm-ppo clean {shlex.quote(str(place))}"
    return f"make room: {clean}; then go on: {resume_command(run)}"


def _more_time(config: Config, failed: Failure) -> Remedy | None:
    """Twice the time of the last try."""
    if isinstance(config.scheduler, DrivenConfig):
        return Remedy((f"scheduler.time_limit={2 * config.scheduler.time_limit}",), "twice the time")
    if config.slurm is None:
        return None
    given = resources_of(config.slurm, failed.task.job_kind)
    name, text = ("task_time", given.task_time) if given.task_time else ("time", given.time)
    seconds = parse_duration(text)
    if seconds is None:
        return None
    longer = seconds * 2 * MORE_TIME ** (failed.attempt - 1)
    return Remedy((f"{key_of(failed.task.job_kind)}.{name}={format_duration(longer)}",), "more time")


def _more_memory(config: Config, failed: Failure) -> Remedy | None:
    """Twice the memory of the last try, which had more than the first one."""
    if config.slurm is None or (given := resources_of(config.slurm, failed.task.job_kind)).mem is None:
        return None
    larger = parse_memory(given.mem) * MORE_MEMORY**failed.attempt
    return Remedy((f"{key_of(failed.task.job_kind)}.mem={math.ceil(larger)}M",), "more memory")


def _other_nodes(config: Config, failed: Failure) -> Remedy | None:
    if config.slurm is None or not failed.node:
        return None
    excluded = resources_of(config.slurm, failed.task.job_kind).exclude
    names = ",".join(dict.fromkeys([*excluded, *node_names(failed.node)]))
    return Remedy((f"{key_of(failed.task.job_kind)}.exclude=[{names}]",), "other nodes")


def _less_at_once(config: Config, failed: Failure) -> Remedy | None:
    """Take less of a GPU's memory at once: vLLM's share of the card, or in a fork the tokens of a batch."""
    if failed.task.stage is Stage.UPDATE:
        less = config.update.tokens_per_micro_batch
        if less == "auto":
            return None
        words = (f"update.tokens_per_micro_batch={max(1, less // 2)}",)
        return Remedy(words, "half of the tokens at once", is_fork=True)
    if (found := _vllm(config, failed.task)) is None:
        return _smaller_batches(config, failed)
    key, share = found
    return Remedy((f"{key}={max(share - _STEP, share / 2):.2f}",), "a smaller share of the card")


def _smaller_batches(config: Config, failed: Failure) -> Remedy:
    """Half of the batch budget of the last try, which had half of the one before."""
    less = halved(config, failed.attempt)
    section, tokens = "reward", less.reward.tokens_per_batch
    if failed.task.stage.generates:
        section, tokens = "rollout", less.rollout.tokens_per_batch
    return Remedy((f"{section}.tokens_per_batch={tokens}",), "fewer tokens at once", is_fork=True)


def _variable(config: Config, failed: Failure, tried: Sequence[tuple[str, str]]) -> Remedy | None:
    """Return the first variable that the stage's jobs do not have yet."""
    if config.slurm is None:
        return None
    there = resources_of(config.slurm, failed.task.job_kind).environment
    left = ((name, value) for name, value in tried if there.get(name) != value)
    if (found := next(left, None)) is None:
        return None
    name, value = found
    return Remedy((f"{key_of(failed.task.job_kind)}.environment.{name}={value}",), _DOES[name])


def _larger_cache(config: Config, failed: Failure) -> Remedy | None:
    found = _vllm(config, failed.task)
    if found is None or found[1] >= _LARGEST_GPU_SHARE:
        return None
    key, share = found
    words = (f"{key}={min(share + _STEP, _LARGEST_GPU_SHARE):.2f}",)
    return Remedy(words, "a larger share of the card for the cache")


def _vllm(config: Config, task: Task) -> tuple[str, float] | None:
    """Return the key of the share of a card that vLLM takes in tasks such as this one, and the share; None
    where they generate, or score, with another engine."""
    section = "rollout" if task.stage.generates else "reward"
    engines = [name for key, name in engines_of(config, task.stage, task.pool) if key.startswith(section)]
    if Engine.VLLM not in engines:
        return None
    share = vllm_in(config, section, task.job_kind).gpu_memory_utilization
    assert share is not None, "vllm_in fills it in"
    return f"{section}.vllm.gpu_memory_utilization", share
