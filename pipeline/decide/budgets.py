"""How much a task computes at once after tries that ran out of GPU memory: half, a quarter. Pure.

What a model computes depends, in the last digits, on what is computed together. So the number of halvings is
a fact of an attempt: it is in its claim before it begins, in its record, and a repetition has the same.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from pipeline.config.engines import Engine, VllmConfig
from pipeline.config.reward import RewardConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.config.schema import Config
from pipeline.run.failures import FailureKind
from pipeline.run.tasks import Stage
from pipeline.workers.claims import Budget

_Section = TypeVar("_Section", RolloutConfig, RewardConfig)


def next_halvings(tried: Iterable[Budget]) -> int:
    """Return how often the batch budget of a task's next attempt is halved: as often as for those before it,
    and once more than for one that ran out of GPU memory."""
    return max((one.halvings + (one.kind is FailureKind.DEVICE_MEMORY) for one in tried), default=0)


def halved(config: Config, halvings: int) -> Config:
    """Return the configuration with the batch budgets of generation and scoring halved so often."""
    rollout, reward = _halved(config.rollout, halvings), _halved(config.reward, halvings)
    return replace(config, rollout=rollout, reward=reward) if halvings else config


def _halved(section: _Section, halvings: int) -> _Section:
    tokens = max(1, section.tokens_per_batch >> halvings)
    return replace(section, tokens_per_batch=tokens, vllm=_halved_vllm(section.vllm, halvings))


def _halved_vllm(given: VllmConfig, halvings: int) -> VllmConfig:
    """Halve what vLLM computes at once. A step must hold one token of each sequence and, where vLLM divides
    no prompt, the longest sequence: of unknown length its tokens stay."""
    sequences, tokens = max(1, given.max_num_seqs >> halvings), given.max_num_batched_tokens
    if tokens is not None and given.max_model_len is not None:
        least = min(tokens, max(sequences, given.max_model_len))
        tokens = max(least, tokens >> halvings)
    return replace(given, max_num_seqs=sequences, max_num_batched_tokens=tokens)


def budget_in_words(config: Config, stage: Stage, halvings: int) -> str:
    """Return a phrase on the batch budget of a stage, which names the keys that have other values than those
    given."""
    less, parts = halved(config, halvings), []
    for name in _BUDGETS.get(stage, ("reward",)):
        given, smaller = getattr(config, name), getattr(less, name)
        is_vllm = given.engine == Engine.VLLM
        if is_vllm:
            of_vllm = f"{smaller.vllm.max_num_seqs} instead of {given.vllm.max_num_seqs}"
            parts.append(f"{name}.vllm.max_num_seqs={of_vllm}")
        if not is_vllm or name == "reward":  # as for the reference
            tokens = f"{smaller.tokens_per_batch} instead of {given.tokens_per_batch}"
            parts.append(f"{name}.tokens_per_batch={tokens}")
    share = "half" if halvings == 1 else f"1/{2**halvings}"
    return f"{share} of the batch budget ({', '.join(parts)})"


_BUDGETS = {Stage.ROLLOUT: ("rollout",), Stage.EVALUATE: ("rollout", "reward")}
"""Sections whose budgets a stage uses, if not the reward's alone."""
