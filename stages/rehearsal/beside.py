"""Check of engines that stay side by side: a reward model in vLLM, and the reference."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.config.engine_rules import vllm_in
from pipeline.config.engines import Engine
from pipeline.config.schema import Config
from stages.engines import Wanted, engine, make_scorer, release_all
from stages.models.devices import device
from stages.models.loading import load_causal_lm
from stages.ppo.batching import Row, micro_batches
from stages.ppo.forward import response_log_probs
from stages.rehearsal.answers import CheckFailed, CheckInput, Shown, with_torch
from stages.rehearsal.engines import check_vllm, free_gib
from stages.rehearsal.models import config_of, policy, random_prompts, reward_model
from stages.rewards.reference import Reference

_TASKS, _ROWS, _LONGEST = 2, 16, 24
_MOST_OFF = 5e-3
"""Largest difference of scores and log-probabilities in fp32 that is rounding."""


@with_torch
def side_by_side(given: CheckInput) -> Shown:
    """Check that a reward model in vLLM and the reference are computed in turn, as by reward tasks of a
    process that stays, and that neither is loaded again."""
    check_vllm(given)
    config, made = _config(given.folder), Counter[str]()
    try:
        found = [_computed(config, given.folder, f"{n}-rehearsal", made) for n in range(_TASKS)]
        left = free_gib()
    finally:
        release_all()
    if again := sorted(role for role, times in made.items() if times > 1):
        advice = "let the update compute the reference: algorithm.kl.reference_in=update"
        raise CheckFailed(f"side by side with another engine the {', '.join(again)} does not stay", advice)
    off = max(abs(one - other) for one, other in zip(*found, strict=True))
    if not off <= _MOST_OFF:
        advice = "take reward.engine=transformers here, or another version of vLLM"
        raise CheckFailed(f"beside each other they compute other numbers each time: off by {off:.1e}", advice)
    stays = f"a reward model in vLLM and the reference stay in one process, off by {off:.1e} at most"
    if not torch.cuda.is_available():
        return Shown(f"{stays}; GPU memory is not shown here", {"off": off})
    return Shown(f"{stays}; {left:.1f} GiB of the GPU are left beside them", {"off": off, "left_gib": left})


def _config(folder: Path) -> Config:
    """Return a configuration whose reward tasks have both; vLLM in a process of its own, as on a GPU."""
    return config_of(
        folder,
        "reward.precision=fp32",
        "algorithm.kl.coef=0.1",
        "algorithm.kl.reference_in=reward",
        "reward.vllm.own_process=true",
        f"reward.vllm.enforce_eager={str(not torch.cuda.is_available()).lower()}",
    )


def _computed(config: Config, folder: Path, attempt: str, made: Counter[str]) -> list[float]:
    """Return the scores and log-probabilities of a task, and count the engines that are made for it."""

    def kept(role: str, name: Engine, make: Callable[[], Any]) -> Any:
        def counted() -> Any:
            made[role] += 1
            return make()

        vllm = vllm_in(config, "reward", "reward") if name is Engine.VLLM else None
        return engine(Wanted(role, attempt, config, (role,), name, vllm), counted)

    sequences, model = random_prompts(_ROWS, 256, _LONGEST), str(reward_model(folder))
    scorer = kept("scorer", Engine.VLLM, lambda: make_scorer(config, Engine.VLLM, model))
    scores = scorer.score(sequences)
    trust = config.model.trust_remote_code
    reference = kept(
        "reference",
        Engine.TRANSFORMERS,
        lambda: Reference(load_causal_lm(policy(folder), config.reward_precision, trust)),
    )
    return [*scores, *_log_probs(reference, config, sequences)]


@torch.inference_mode()
def _log_probs(reference: Reference, config: Config, sequences: Sequence[Sequence[int]]) -> list[float]:
    """Return the log-probabilities of all tokens but the first of each sequence."""
    rows = [Row(tokens[:1], tokens[1:]) for tokens in sequences]
    found: list[float] = []
    for batch in micro_batches(rows, range(len(rows)), config.reward.tokens_per_batch):
        found += response_log_probs(reference.model, batch.to(device()), 1.0).flatten().tolist()
    return found
