"""Evaluate: greedy responses to held-out prompts, scored like a rollout."""

import statistics as stats

import pyarrow as pa

from pipeline.run.schemas import GREEDY_SAMPLE, PROMPTS, ROLLOUT, component_column, version_of
from pipeline.run.shards import write_shard
from pipeline.run.tasks import PREPARE, Task
from stages.context import Context, Result, UserError
from stages.engines.base import Sampling
from stages.generation.responding import respond, response_metrics
from stages.rewards.components import component_scores
from stages.tasks.reward import reward_table


def run(task: Task, context: Context) -> Result:
    context.read(PREPARE)
    prompts = context.table(PREPARE, PROMPTS, "heldout")
    if prompts.num_rows == 0:
        raise UserError(f"data.heldout={context.config.data.heldout} has no usable row")
    sampling = Sampling(stop_token_ids=context.config.rollout.stop_token_ids)
    rows = respond(context, prompts, task.iteration, sampling, samples=[GREEDY_SAMPLE])
    scores, _ = component_scores(context, rows)
    scored = reward_table(context.config, rows, scores, reference=None)
    kept = ["reward", *(component_column(name) for name in scores)]
    table = pa.table(
        {name: rows[name] for name in rows.column_names} | {name: scored[name] for name in kept}
    ).replace_schema_metadata(rows.schema.metadata)
    output = write_shard(context.paths, context.files.data(context.attempt), table)
    metrics = response_metrics(rows) | {
        f"evaluate/{name}": stats.fmean(scored[name].to_pylist()) for name in kept
    }
    return Result((output,), rows.num_rows, version_of(ROLLOUT), task.iteration, metrics)
