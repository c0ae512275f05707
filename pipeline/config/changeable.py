"""Which settings may change while a run goes on: those that its numbers do not depend on. Pure.

Every field of the configuration is in one of the tables below, by its class, or its class is in
:data:`FROZEN_CLASSES`. A field that is in none is frozen.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from pipeline.config.algorithm import AlgorithmConfig
from pipeline.config.allocation import AllocationConfig, DrivenConfig, StepConfig
from pipeline.config.compose import to_mapping
from pipeline.config.engines import VllmConfig
from pipeline.config.evaluate import EvaluateConfig
from pipeline.config.issue import ConfigIssue
from pipeline.config.notify import NotifyConfig
from pipeline.config.reward import RewardConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.config.scheduler import (
    LocalConfig,
    LocalStageConfig,
    LocalUpdateConfig,
    ResourcesConfig,
    SlurmConfig,
    resources_of,
)
from pipeline.config.schema import (
    Config,
    DataConfig,
    MlflowConfig,
    ModelConfig,
    StorageConfig,
    TensorboardConfig,
    WandbConfig,
)
from pipeline.config.update import UpdateConfig


class Effect(StrEnum):
    """Moment from which a changed setting holds."""

    NEXT_JOB = "jobs that start later"
    NEXT_PASS = "the next pass"


CHANGEABLE: Mapping[type, tuple[Effect, tuple[str, ...]]] = {
    ResourcesConfig: (
        Effect.NEXT_JOB,
        (
            *("partition", "account", "qos", "time", "gres", "constraint", "exclude", "reservation"),
            *("array_parallelism", "requeue", "signal", "setup", "linger", "start_early", "task_time"),
        ),
    ),
    StepConfig: (
        Effect.NEXT_JOB,
        ("gpus_per_node", "cpus_per_task", "mem", "container", "python", "environment", "options"),
    ),
    SlurmConfig: (
        Effect.NEXT_JOB,
        (
            *("account", "qos", "options", "setup", "container", "python", "environment", "mail_user"),
            *("mail_type", "linger_max", "max_attempts", "max_submitted", "check_minutes"),
        ),
    ),
    AllocationConfig: (Effect.NEXT_JOB, ("container", "python", "environment", "grace")),
    DrivenConfig: (Effect.NEXT_PASS, ("max_attempts", "time_limit")),
    LocalConfig: (Effect.NEXT_JOB, ("slots",)),
    LocalStageConfig: (Effect.NEXT_JOB, ("slots", "linger")),
    VllmConfig: (Effect.NEXT_JOB, ("gpu_memory_utilization", "kv_cache_gib")),
    EvaluateConfig: (Effect.NEXT_PASS, ("command_seconds", "command_attempts")),
    UpdateConfig: (Effect.NEXT_PASS, ("keep_last", "keep_every", "keep_shards_last")),
    WandbConfig: (Effect.NEXT_PASS, ("mode", "samples_every")),
    TensorboardConfig: (Effect.NEXT_PASS, ("enabled",)),
    MlflowConfig: (Effect.NEXT_PASS, ("enabled",)),
    NotifyConfig: (Effect.NEXT_PASS, ("command", "on", "stall_after", "time_limit")),
    StorageConfig: (Effect.NEXT_PASS, ("purge_days",)),
}
"""Fields that may change, by class."""

FROZEN: Mapping[type, tuple[str, ...]] = {
    Config: ("name", "run_dir", "seed", "iterations"),
    StepConfig: ("nodes", "ntasks_per_node"),
    SlurmConfig: ("kind", "pools"),
    AllocationConfig: ("kind", "pools"),
    LocalConfig: ("kind", "gpus", "pools"),
    LocalStageConfig: ("gpus",),
    LocalUpdateConfig: ("ranks",),
    VllmConfig: (
        *("tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "max_num_seqs"),
        *("max_num_batched_tokens", "enable_prefix_caching", "model_runner", "async_scheduling"),
        *("own_process", "enforce_eager", "keep_compiled"),
    ),
    EvaluateConfig: (
        *("every", "num_prompts", "num_threads", "samples_per_prompt", "temperature", "top_p", "top_k"),
        *("seed", "pass_at", "solved_at", "command", "command_every", "best", "best_is"),
    ),
    UpdateConfig: (
        *("engine", "epochs", "minibatches", "tokens_per_micro_batch", "learning_rate"),
        *("critic_learning_rate", "schedule", "warmup_steps", "betas", "epsilon", "weight_decay"),
        *("max_grad_norm", "max_skipped_steps", "zero_stage", "precision", "activation_checkpointing"),
        *("offload_optimizer", "attention", "remove_padding", "lora", "save_every", "num_threads"),
    ),
    RolloutConfig: (
        *("engine", "num_shards", "staleness", "oversample", "carry", "samples_per_prompt"),
        *("max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "tokens_per_batch"),
        *("precision", "merge_adapters", "device_map", "num_threads", "multi_turn"),
    ),
    WandbConfig: ("project", "entity", "tags", "name", "group", "job_type", "notes"),
    MlflowConfig: ("uri", "experiment"),
}
"""Fields that stay as they were when the run began, of classes that hold others too."""

FROZEN_CLASSES = (ModelConfig, DataConfig, AlgorithmConfig, RewardConfig)
"""Classes of which all stays, but for what classes below them say."""


def effect_of(owner: type, name: str) -> Effect | None:
    """Return from when on a changed field of a class holds; None for one that is frozen."""
    for one in owner.__mro__:
        effect, names = CHANGEABLE.get(one, (None, ()))
        if name in names:
            return effect
    return None


@dataclasses.dataclass(frozen=True)
class Difference:
    """A setting with two values."""

    key: str
    before: Any
    """Plain value, as JSON holds it."""
    after: Any


def differences(before: Config, after: Config) -> tuple[Difference, ...]:
    """Return the settings in which two configurations differ, each as deep as both have the same keys."""
    return tuple(_apart("", to_mapping(before), to_mapping(after)))


def _apart(key: str, before: Any, after: Any) -> Iterator[Difference]:
    if before == after:
        return
    if not (isinstance(before, dict) and isinstance(after, dict)):
        yield Difference(key, before, after)
    elif (kind := before.get("kind")) != after.get("kind"):
        yield Difference(f"{key}.kind", kind, after.get("kind"))
    elif before.keys() != after.keys():
        yield Difference(key, before, after)
    else:
        for name in before:
            yield from _apart(f"{key}.{name}" if key else name, before[name], after[name])


def value_in_words(value: Any) -> str:
    """Write a plain value on one line, as one gives it on a command line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {value_in_words(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(value_in_words, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def refusals(before: Config, after: Config) -> Iterator[ConfigIssue]:
    """Yield the settings that differ and may not change while a run goes on."""
    for one in differences(before, after):
        if _effect_at(before, one.key) is None:
            now = "what the run has computed depends on it" if one.key != "run_dir" else "the run lies there"
            yield ConfigIssue(
                one.key, one.after, f"cannot change while the run goes on: {now} ({one.before})"
            )
    yield from _of_devices(before, after)


def _effect_at(config: Config, key: str) -> Effect | None:
    """Return the effect of a key: that of the last field on the way to it."""
    node: Any = config
    found: Effect | None = None
    for part in key.split("."):
        if isinstance(node, Mapping):
            node = node.get(part)
        elif dataclasses.is_dataclass(node):
            found = effect_of(type(node), part)
            node = getattr(node, part, None)
    return found


def _of_devices(before: Config, after: Config) -> Iterator[ConfigIssue]:
    """Yield stages that would get GPUs, or lose all, and a run that would go to another cluster."""
    if before.scheduler.kind != after.scheduler.kind:
        return
    if before.slurm and after.slurm and before.slurm.cluster != after.slurm.cluster:
        why = "a run stays on its cluster; slurm-ppo resume RUN --take-over, typed there, moves it"
        yield ConfigIssue("scheduler.options.clusters", after.slurm.cluster or "null", why)
    theirs = getattr(after.scheduler, "resources", {})
    for name, mine in getattr(before.scheduler, "resources", {}).items():
        if name in theirs and bool(mine.num_gpus) != bool(theirs[name].num_gpus):
            why = "cannot change while the run goes on: with GPUs a stage computes other numbers than without"
            yield ConfigIssue(f"scheduler.{name}.gpus_per_node", theirs[name].gpus_per_node or "null", why)


def of_worker(config: Config, job_kind: str) -> tuple[object, ...]:
    """Return what may change of that which a worker of a job kind works with."""
    slurm = config.slurm
    of_jobs = (resources_of(slurm, job_kind), slurm.linger_max) if slurm else ()
    return (*of_jobs, config.rollout.vllm, config.reward.vllm, config.attempts_of(job_kind))


def asked_for(config: SlurmConfig, job_kind: str) -> ResourcesConfig:
    """Return what jobs of a kind are submitted with: their resources without what workers read themselves."""
    given = resources_of(config, job_kind)
    return dataclasses.replace(given, linger=0, start_early=True, task_time=None)


def applied(mapping: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a configuration's plain values with another at a dotted key. Raises KeyError where it has no
    such key."""
    first, _, rest = key.partition(".")
    if first not in mapping:
        raise KeyError(key)
    return {**mapping, first: applied(mapping[first], rest, value) if rest else value}
