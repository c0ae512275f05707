"""Reward: score one rollout shard, with what pools have scored of it, and compute the reference's
log-probabilities unless the update does.
"""

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import torch

from pipeline.algorithmconfig import ReferenceStage
from pipeline.config import Config
from pipeline.schemas import REWARD, ROLLOUT, SCORE, component_column, conform, is_sampled
from pipeline.shards import write_shard
from pipeline.tasks import PREPARE, Stage, Task
from stages.context import Context, Result
from stages.engines import engine
from stages.models import device, load_causal_lm
from stages.ppo.batching import Row, micro_batches
from stages.ppo.forward import response_log_probs
from stages.responding import num_tokens
from stages.rewards.components import component_scores


def run(task: Task, context: Context) -> Result:
    context.read(PREPARE)
    source = context.read(Task(task.iteration, Stage.ROLLOUT, task.shard))
    rows = context.table(source.task, ROLLOUT)
    pooled = pool_scores(context)  # before anything is computed: they may be missing or stale
    mine, metrics = component_scores(context, rows, context.config.reward.components_of(None))
    scores = {name: (pooled | mine)[name] for name in context.config.reward.components}
    reference = reference_log_probs(context, rows) if needs_reference(context.config) else None
    table = reward_table(context.config, rows, scores, reference)
    output = write_shard(context.paths, context.files.data(context.attempt), table)
    metrics["responses"] = float(pc.sum(is_sampled(rows)).as_py())
    metrics["response_tokens"] = num_tokens(rows)
    return Result((output,), rows.num_rows, "reward/1", source.policy_version, metrics)


def pool_scores(context: Context) -> dict[str, list[float]]:
    """Per component that has a pool: one score per row of this task's rollout shard."""
    scores: dict[str, list[float]] = {}
    for pool in context.config.reward.pools:
        task = replace(context.task, stage=Stage.SCORE, pool=pool)
        table = context.table(task, SCORE)
        for name in context.config.reward.components_of(pool):
            scores[name] = table[component_column(name)].to_pylist()
    return scores


def needs_reference(config: Config) -> bool:
    """Whether this stage computes the reference's log-probabilities. Without, rules alone need no model."""
    kl = config.algorithm.kl
    return kl.coef > 0 and kl.reference_in is ReferenceStage.REWARD


def reward_table(
    config: Config,
    rows: pa.Table,
    scores: dict[str, list[float]],
    reference: Sequence[list[float] | None] | None,
) -> pa.Table:
    """The weighted sum, each component, and the reference log-probabilities, row by row."""
    weights = {name: component.weight for name, component in config.reward.components.items()}
    total = [
        sum(weights[name] * score for name, score in zip(scores, values, strict=True))
        for values in zip(*scores.values(), strict=True)
    ]
    columns = {component_column(name): pa.array(values, pa.float32()) for name, values in scores.items()}
    return conform(
        {
            "prompt_id": rows["prompt_id"].combine_chunks(),
            "sample_index": rows["sample_index"].combine_chunks(),
            "reward": total,
            "reference_logprobs": reference or pa.nulls(rows.num_rows),
        },
        REWARD,
        extra=pa.table(columns),
    )


@torch.inference_mode()
def reference_log_probs(context: Context, rows: pa.Table) -> list[list[float] | None]:
    """Log-probability of each response token under the frozen reference, sampling temperature included.

    None for greedy responses, which are never trained on.
    """
    config = context.config
    directory = context.source(config.model.reference or config.model.policy)
    reward, trust = config.reward, config.model.trust_remote_code
    model = engine(
        "reference",
        (directory, reward.precision, reward.device_map),
        lambda: load_causal_lm(directory, reward.precision, trust, reward.device_map),
    )
    prompts, responses = rows["prompt_tokens"].to_pylist(), rows["response_tokens"].to_pylist()
    sequences = [Row(p, r) for p, r in zip(prompts, responses, strict=True)]
    sampled = [i for i, is_one in enumerate(is_sampled(rows).to_pylist()) if is_one]
    found: dict[int, list[float]] = {i: [] for i in sampled}
    # A prompt that the engine refused has no response, and may be one that this model cannot take either.
    written = [i for i in sampled if responses[i]]
    with context.computing():
        for batch in micro_batches(sequences, written, reward.tokens_per_batch):
            log_probs = response_log_probs(model, batch.to(device()), config.rollout.temperature)
            for index, values in zip(batch.rows.tolist(), log_probs.tolist(), strict=True):
                found[index] = values[: len(responses[index])]
    return [found.get(i) for i in range(len(sequences))]
