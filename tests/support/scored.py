"""Scored responses of some iterations, committed without an engine that wrote them."""

from dataclasses import replace

import pyarrow as pa
import torch

from benchmarks.noop import make_record
from pipeline.run.commits import publish
from pipeline.run.directory import Run
from pipeline.run.schemas import REWARD, ROLLOUT, version_of
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
            tables = _tables(iteration, shard, run.config.rollout.samples_per_prompt)
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


def _tables(iteration: int, shard: int, samples: int) -> dict[Stage, pa.Table]:
    """Ragged rows of random tokens, and their rewards; ``samples`` of each prompt."""
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
    return {
        Stage.ROLLOUT: rollout,
        Stage.REWARD: reward_table(rollout, scores, reference_logprobs=noise, rm=scores),
    }
