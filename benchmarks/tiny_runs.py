"""Runs of tiny policies of random weights in one process, for demos of what a setting is worth.

Functions of the stages compute everything. A policy learns from rewards of the demo's own function, which
are of tokens and not of text: what random weights write is seldom text.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from benchmarks.in_process import Loop, Rule, learner_of, respond
from benchmarks.prepared import record_of
from pipeline.config.compose import compose
from pipeline.config.resolve import resolve
from pipeline.run.commits import publish
from pipeline.run.directory import Run, create_run
from pipeline.run.schemas import PROMPTS, conform
from pipeline.run.tasks import PREPARE, Stage, Task
from stages import ranks
from stages.engines import make_generator
from stages.models.numerics import set_up_torch
from stages.models.tokenizers import load_tokenizer

NUM_PROMPTS = 2000
HALF = 130
"""Ids below are of the first half of the vocabulary."""
LAST = 3
"""Evaluations whose mean is compared with a target."""
BY_RULE = ("reward=rule", "reward.components.rule.function=unused:scores")
"""A component whose function is given to :func:`loop_of`."""


def settings(policy: Path, name: str, seed: int, iterations: int) -> list[str]:
    """Return what runs have in common. They lie beside their policy, as do prompts, which no run reads."""
    return [
        "algorithm.kl.coef=0",
        "tracking=none",
        f"run_dir={policy.parent / name}",
        f"model.policy={policy}",
        f"data.prompts={policy.parent / 'prompts.jsonl'}",
        "rollout.num_shards=1",
        f"iterations={iterations}",
        f"seed={seed}",
    ]


def prompts_of(loop_run: Run, first: int, count: int) -> pa.Table:
    """Return a table of prompts, by number."""
    tokenizer = load_tokenizer(loop_run.config.model.policy, loop_run.config.model)
    texts = [f"say {number}:" for number in range(first, first + count)]
    rows = {
        "prompt_id": [str(number) for number in range(first, first + count)],
        "prompt_text": texts,
        "prompt_messages": [None] * count,
        "prompt_tokens": [tokenizer(text)["input_ids"] for text in texts],
    }
    return conform(rows, PROMPTS)


def loop_of(words: Iterable[str], rewards: Mapping[str, Rule]) -> Loop:
    """Make a run of which prepare is committed, and load its models; ``rewards`` are for its components."""
    run = create_run(resolve(compose([*words])))
    publish(run.paths, record_of(PREPARE, ()))
    config, path = run.config, run.config.model.policy
    set_up_torch(1, config.seed)
    ranks.start_distributed()
    learner = learner_of(config)
    tokenizer, generator = load_tokenizer(path, config.model), make_generator(config, path)
    return Loop(run, prompts_of(run, 0, NUM_PROMPTS), tokenizer, generator, rewards, learner, 0.0)


def heldout_mean(loop: Loop, prompts: pa.Table, rule: Rule) -> float:
    """Return the mean score of sampled responses, with the same seeds for every policy of the run."""
    scores = rule(respond(loop, Task(1, Stage.EVALUATE), prompts))
    return statistics.fmean(score or 0.0 for score in scores)


def reaches(values: Sequence[float], target: float) -> int | None:
    """Return the first index up to which the mean of the last evaluations is at the target; None: never."""
    for end in range(LAST, len(values) + 1):
        if statistics.fmean(values[end - LAST : end]) >= target:
            return end - 1
    return None
