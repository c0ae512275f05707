"""The smallest change of a configuration with which a stage fits into a GPU."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.config.engine_rules import ALONE
from pipeline.config.engines import Engine
from pipeline.config.schema import Config
from pipeline.config.update import Precision
from pipeline.forecast.stages import longest_response

Change = tuple[str, Any]
"""A key of the configuration and its new value."""
_MOST_RANKS = 64


def smallest_change(config: Config, stage: str, fits: Callable[[Config], bool]) -> list[str] | None:
    """Return words of a command line with which a stage fits; None where no change that is known will do.

    Candidates are tried in a fixed order, each beside those before it, until they suffice; then those that
    are not needed are dropped.
    """
    candidates = _for_update(config) if stage == "update" else _for_serving(config, stage)
    taken: list[tuple[Change, ...]] = []
    for candidate in candidates:
        taken.append(candidate)
        if fits(changed(config, taken)):
            break
    else:
        return None
    for candidate in reversed(taken[:-1]):
        without = [other for other in taken if other is not candidate]
        taken = without if fits(changed(config, without)) else taken
    found = dict(change for candidate in taken for change in candidate)
    return [f"{key}={str(value).lower()}" for key, value in found.items()]


def changed(config: Config, candidates: Sequence[tuple[Change, ...]]) -> Config:
    """Return the configuration with some changes."""
    for key, value in (change for candidate in candidates for change in candidate):
        config = _with_value(config, key.split("."), value)
    return config


def _with_value(owner: Any, path: Sequence[str], value: object) -> Any:
    name, *rest = path
    return dataclasses.replace(
        owner, **{name: _with_value(getattr(owner, name), rest, value) if rest else value}
    )


def _for_update(config: Config) -> list[tuple[Change, ...]]:
    update, ranks = config.update, config.scheduler.num_update_ranks
    found: list[tuple[Change, ...]] = []
    tokens = update.micro_batch_tokens // 2
    while tokens > longest_response(config):
        found.append((("update.tokens_per_micro_batch", tokens),))
        tokens //= 2
    found.append((("update.tokens_per_micro_batch", longest_response(config) + 1),))
    if not update.activation_checkpointing:
        found.append((("update.activation_checkpointing", True),))
    if ranks > 1:
        found += [(("update.zero_stage", stage),) for stage in range(update.zero + 1, 4)]
    if update.lora is None and not update.offload_optimizer:
        stage = (("update.zero_stage", 1),) if update.zero == 0 and ranks == 1 else ()
        found.append((("update.offload_optimizer", True), *stage))
    return found + _more_ranks(config)


def _more_ranks(config: Config) -> list[tuple[Change, ...]]:
    """Return candidates with two, four ... times as many ranks, whatever runs them."""
    if config.scheduler.kind == "local":
        key, number, each = "scheduler.update.ranks", config.scheduler.num_update_ranks, 1
    else:
        nodes = config.scheduler.update.nodes
        key, number, each = "scheduler.update.nodes", nodes, config.scheduler.num_update_ranks // nodes
    sizes = []
    while number * each < _MOST_RANKS:
        number *= 2
        sizes.append(number)
    return [((key, size), ("update.zero_stage", 3)) for size in sizes]


def _for_serving(config: Config, stage: str) -> list[tuple[Change, ...]]:
    section = "rollout" if stage == "rollout" else "reward"
    given = getattr(config, section)
    found: list[tuple[Change, ...]] = []
    if section == "rollout" and given.engine == Engine.VLLM:
        return [(("rollout.vllm.tensor_parallel_size", size),) for size in (2, 4, 8)]
    if section == "reward" and stage not in ("reward", *(f"score-{pool}" for pool in given.pools)):
        if given.vllm.gpu_memory_utilization is None:
            found.append((("reward.vllm.gpu_memory_utilization", ALONE),))
        return found + [(("reward.vllm.tensor_parallel_size", size),) for size in (2, 4, 8)]
    tokens = given.tokens_per_batch // 2
    while tokens > longest_response(config):
        found.append(((f"{section}.tokens_per_batch", tokens),))
        tokens //= 2
    precision = config.rollout_precision if section == "rollout" else config.reward_precision
    if precision is Precision.FP32:
        found.append(((f"{section}.precision", Precision.BF16),))
    return found
