"""Times an update of one optimizer step, of the run's own models, in this process: ``python -m
stages.rehearsal.candidates`` reads a JSON object from standard input and prints one as its last line.
:mod:`pipeline.checks.candidates` starts one process for each candidate.

| input | |
|---|---|
| ``config`` | the configuration with the candidate's settings; null: what this machine can do |
| ``lengths`` | prompt and response tokens of each row |
| ``rounds`` | updates of which the median counts, after one that warms up |
"""

import importlib.util
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from pipeline.config.algorithm import AlgorithmConfig, Estimator, KLConfig
from pipeline.config.compose import from_mapping
from pipeline.config.model_files import text_settings
from pipeline.config.schema import Config
from pipeline.forecast.candidates import MachineFacts
from stages import ranks
from stages.models.numerics import forget_peaks, set_up_torch
from stages.ppo.experience import Experience, build_experience
from stages.ppo.resuming import critic_from, policy_from
from stages.ppo.timing import timed_updates
from stages.ppo.trainer import Trainer
from stages.ppo.training import Learner
from stages.rehearsal.allocation import half_precision
from stages.rehearsal.models import tables_of

Lengths = Sequence[tuple[int, int]]
"""Prompt and response tokens of each row."""
_FIRST_ID = 4
"""First id of those that stand for tokens: special ones usually come before."""


def facts_here() -> MachineFacts:
    """Return what this process's device can do, as torch says."""
    has_flash = importlib.util.find_spec("flash_attn") is not None
    if torch.cuda.is_available():
        has_bf16 = half_precision() == "bf16"
        return MachineFacts(torch.cuda.get_device_name(), True, has_bf16, has_flash)
    return MachineFacts("this machine's CPUs", False, has_bf16_instructions())


def has_bf16_instructions() -> bool:
    """Whether this processor multiplies in bf16 (avx512_bf16, AMX), as torch says."""
    if capabilities := getattr(torch.cpu, "get_capabilities", None):
        can = capabilities()
        return bool(can.get("avx512_bf16") or can.get("amx_bf16"))
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def measured(config: Config, lengths: Lengths, rounds: int) -> dict[str, float]:
    """Return the median seconds of an update of one step over rows of these lengths, their tokens per second,
    and the peak in bytes: of the GPU by torch's count, else of this process."""
    set_up_torch(config.update.num_threads, seed=0)
    ranks.start_distributed()
    config = one_step(config, lengths)
    learner, experience = learner_of(config), experience_of(config, lengths)
    forget_peaks()
    seconds = statistics.median(timed_updates(learner, experience, rounds))
    return {"seconds": seconds, "tokens_per_second": sum(map(sum, lengths)) / seconds, "peak": peak()}


def one_step(config: Config, lengths: Lengths) -> Config:
    """Return a configuration of an update of one step over such rows, with a critic where the run has one,
    and without reference and shaping, which no candidate changes. Pure."""
    has_critic = config.algorithm.estimator is Estimator.GAE
    estimator = Estimator.GAE if has_critic else Estimator.REINFORCE_PLUS_PLUS
    longest = max(response for _, response in lengths)
    return replace(
        config,
        data=replace(config.data, prompts_per_iteration=len(lengths)),
        rollout=replace(config.rollout, samples_per_prompt=1, max_new_tokens=longest),
        update=replace(config.update, epochs=1, minibatches=1),
        algorithm=AlgorithmConfig(estimator=estimator, kl=KLConfig(coef=0.0)),
    )


def learner_of(config: Config) -> Learner:
    """Load the run's models as its first update does."""
    update, directory = config.update, Path(config.model.policy)
    policy, critic = Trainer("policy", policy_from(directory, config), update.learning_rate, update), None
    if config.algorithm.estimator is Estimator.GAE:
        model = critic_from(Path(config.model.critic or directory), config)
        critic = Trainer("critic", model, update.critic_learning_rate, update)
    return Learner(config, policy, critic)


def experience_of(config: Config, lengths: Lengths) -> Experience:
    """Return rows of random tokens and scores, of these lengths."""
    draw, size = random.Random(0), int(text_settings(Path(config.model.policy))["vocab_size"])

    def tokens(number: int) -> list[int]:
        return [draw.randrange(min(_FIRST_ID, size - 1), size) for _ in range(number)]

    prompts, responses = ([tokens(pair[part]) for pair in lengths] for part in (0, 1))
    tables = tables_of(prompts, responses, [draw.gauss(0, 1) for _ in lengths])
    return build_experience(*tables, shards=[0] * len(lengths))


def peak() -> float:
    """Return the most bytes at a time since the peaks were last forgotten."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    status = Path("/proc/self/status")
    if status.is_file():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024.0
    return float(psutil.Process().memory_info().rss)


def answer(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was measured, or what this machine can do where there is no configuration."""
    if given["config"] is None:
        return asdict(facts_here())
    lengths = [(prompt, response) for prompt, response in given["lengths"]]
    return measured(from_mapping(given["config"]), lengths, given["rounds"])


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
