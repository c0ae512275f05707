"""Rollout: sample responses to one shard of an iteration's prompts."""

from pipeline.deal import deal
from pipeline.seeds import derive_seed
from pipeline.shards import write_shard
from pipeline.tasks import Task
from stages.context import Context, Result
from stages.engines.base import Sampling
from stages.progress import SAVE_SECONDS
from stages.responding import respond, response_metrics


def run(task: Task, context: Context, save_every: float = SAVE_SECONDS) -> Result:
    """Saves progress every ``save_every`` seconds. Raises StoppedOnWarning, with progress saved."""
    config, rollout = context.config, context.config.rollout
    # 1. this shard's slice of the epoch's permutation
    prompts = context.prompts()
    dealt = deal(
        prompts.num_rows,
        iteration=task.iteration,
        prompts_per_iteration=config.data.prompts_per_iteration,
        num_shards=rollout.num_shards,
        shard=task.shard,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )
    prompts = prompts.take(dealt.indices)
    # 2. responses of the previous iteration's policy, each from a seed of its own
    version = task.iteration - 1
    ids = [
        (i, sample) for i in prompts["prompt_id"].to_pylist() for sample in range(rollout.samples_per_prompt)
    ]
    seeds = [derive_seed(config.seed, task.iteration, "rollout", prompt, sample) for prompt, sample in ids]
    sampling = Sampling(
        rollout.temperature, rollout.top_p, rollout.top_k, stop_token_ids=rollout.stop_token_ids
    )
    rows = respond(context, prompts, version, sampling, seeds, save_every)
    # 3. one Arrow shard
    output = write_shard(context.paths, context.files.data(context.attempt), rows)
    metrics = response_metrics(rows) | {"epoch": float(dealt.epoch)}
    return Result((output,), rows.num_rows, "rollout/1", version, metrics)
