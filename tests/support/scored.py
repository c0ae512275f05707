"""Scored responses of some iterations, committed without an engine that wrote them."""

import math
from dataclasses import replace

import pyarrow as pa
import torch

from benchmarks.noop import make_record
from pipeline.config.algorithm import ReferenceStage
from pipeline.config.schema import Config
from pipeline.run.commits import publish
from pipeline.run.directory import Run
from pipeline.run.schemas import (
    REWARD,
    ROLLOUT,
    STEP_REWARDS,
    TEACHER_LOGPROBS,
    TEACHER_TOP_LOGPROBS,
    TEACHER_TOP_TOKENS,
    TEACHER_WEIGHT,
    version_of,
)
from pipeline.run.shards import write_shard
from pipeline.run.tasks import PREPARE, Stage, Task
from tests.support.rollouts import reward_table, rollout_table

ROWS = 4
"""Responses of a shard."""
_ATTEMPT = "1-noop"


def commit_scored(run: Run) -> Run:
    """Commit what every update of a run reads, besides what the one before it has learned."""
    assert publish(run.paths, make_record(PREPARE))
    for iteration in range(1, run.plan.iterations + 1):
        for shard in range(run.plan.num_shards):
            tables = _tables(iteration, shard, run.config)
            for stage, schema in ((Stage.ROLLOUT, ROLLOUT), (Stage.REWARD, REWARD)):
                _commit(run, Task(iteration, stage, shard), schema, tables[stage])
    return run


def _commit(run: Run, task: Task, schema: pa.Schema, table: pa.Table) -> None:
    path = run.paths.task(task).data(_ATTEMPT)
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = write_shard(run.paths, path, table)
    assert publish(
        run.paths,
        replace(make_record(task), outputs=(entry,), rows=table.num_rows, schema=version_of(schema)),
    )


def _tables(iteration: int, shard: int, config: Config) -> dict[Stage, pa.Table]:
    """Ragged rows of random tokens, and their rewards."""
    samples = config.rollout.samples_per_prompt
    draw = torch.Generator().manual_seed(1000 * iteration + shard)
    numbers = range(shard * ROWS, (shard + 1) * ROWS)
    lengths = [(1 + (5 * i) % 11, 3 + (7 * i + iteration) % 10) for i in numbers]
    tokens = [torch.randint(2, 258, (p + r,), generator=draw).tolist() for p, r in lengths]
    prompts = [row[:p] for row, (p, _) in zip(tokens, lengths, strict=True)]
    noise = [(torch.randn(r, generator=draw) / 3 - 5).tolist() for _, r in lengths]
    scores = torch.randn(ROWS, generator=draw).tolist()
    rollout = rollout_table(
        [row[p:] for row, (p, _) in zip(tokens, lengths, strict=True)],
        prompt_id=[f"p{i // samples}" for i in numbers],
        sample_index=[i % samples for i in numbers],
        prompt_tokens=[prompts[i - i % samples] for i in range(ROWS)],
        rollout_logprobs=noise,
    )
    if config.is_refilled and iteration % 2 == 0:  # few have a spread: the first group of all shards
        scores = [score if shard == 0 and i < samples else 1.0 for i, score in enumerate(scores)]
    reference = noise if config.algorithm.kl.reference_in is ReferenceStage.REWARD else None
    rewards = reward_table(rollout, scores, reference_logprobs=reference, rm=scores)
    top_k = config.algorithm.distillation.top_k
    for name, column in (_teachers(noise, top_k) if config.reward.teachers else {}).items():
        rewards = rewards.append_column(name, column)
    if any(getattr(component, "steps", None) for component in config.reward.components.values()):
        rewards = rewards.append_column(STEP_REWARDS, _steps(noise, scores))
    return {Stage.ROLLOUT: rollout, Stage.REWARD: rewards}


def _teachers(noise: list[list[float]], top_k: int | None) -> dict[str, pa.Array]:
    """Columns of teachers that have all responses but every third."""
    log_probs = [[x + 0.5 for x in row] if i % 3 else None for i, row in enumerate(noise)]
    weights = [0.0, 1.0, 0.5]
    found = {
        TEACHER_LOGPROBS: pa.array(log_probs, pa.list_(pa.float32())),
        TEACHER_WEIGHT: pa.array([weights[i % 3] for i in range(len(noise))], pa.float64()),
    }
    if top_k is None:
        return found
    ids = [
        [(3 * t + 5 * j + i) % 258 for t in range(len(row)) for j in range(top_k)]
        for i, row in enumerate(noise)
    ]
    likely = [[x / 4 - math.log(top_k) for x in row for _ in range(top_k)] for row in noise]
    taught = [bool(i % 3) for i in range(len(noise))]
    return found | {
        TEACHER_TOP_TOKENS: pa.array(_where(taught, ids), pa.list_(pa.int32())),
        TEACHER_TOP_LOGPROBS: pa.array(_where(taught, likely), pa.list_(pa.float32())),
    }


def _where(chosen: list[bool], rows: list[list]) -> list[list | None]:
    return [row if is_chosen else None for is_chosen, row in zip(chosen, rows, strict=True)]


def _steps(noise: list[list[float]], scores: list[float]) -> pa.Array:
    """Two steps of each response, the first at its second token, whose sum is the score; of the score 1 of
    groups without a spread both are the same."""
    firsts = [score * (0.5 if score == 1.0 else 0.25) for score in scores]
    steps = [
        [{1: first, len(row) - 1: score - first}.get(t) for t in range(len(row))]
        for row, score, first in zip(noise, scores, firsts, strict=True)
    ]
    return pa.array(steps, pa.list_(pa.float32()))
