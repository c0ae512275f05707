"""Evaluate: responses to held-out prompts, greedy or sampled, scored like a rollout."""

from collections.abc import Mapping

import pyarrow as pa

from pipeline.config.schema import Config
from pipeline.run.schemas import GREEDY_SAMPLE, HELDOUT_SET, PROMPTS, ROLLOUT, component_column, version_of
from pipeline.run.shards import write_shard
from pipeline.run.tasks import PREPARE, Task
from stages.context import Context, Result, UserError
from stages.engines.base import Sampling
from stages.evaluation.numbers import Sampled, evaluation_numbers
from stages.generation.responding import respond, response_metrics
from stages.models.tokenizers import stop_ids_of
from stages.rewards.components import component_scores
from stages.tasks.reward import reward_table


def run(task: Task, context: Context) -> Result:
    config = context.config
    context.read(PREPARE)
    prompts = context.table(PREPARE, PROMPTS, "heldout")
    if prompts.num_rows == 0:
        raise UserError(f"data.heldout={config.data.heldout} has no usable row")
    count = config.evaluate.samples_per_prompt
    samples = [GREEDY_SAMPLE] if count is None else list(range(count))
    prompts, sets = without_sets(prompts, len(samples))
    sampling = sampling_of(config, stop_ids_of(context))
    rows = respond(context, prompts, task.iteration, sampling, samples)
    scores, counted = component_scores(context, rows)
    scored = reward_table(config, rows, scores, reference=None)
    kept = ["reward", *(component_column(name) for name in scores)]
    columns = {name: rows[name] for name in rows.column_names} | {name: scored[name] for name in kept}
    columns |= {HELDOUT_SET: pa.array(sets, pa.string())} if sets else {}
    table = pa.table(columns).replace_schema_metadata(rows.schema.metadata)
    output = write_shard(context.paths, context.files.data(context.attempt), table)
    numbers = evaluation_numbers({name: scored[name].to_pylist() for name in kept}, sets, sampled_of(config))
    metrics = response_metrics(rows) | numbers | held_out(counted)
    return Result((output,), rows.num_rows, version_of(ROLLOUT), task.iteration, metrics)


def held_out(counted: Mapping[str, float]) -> dict[str, float]:
    """Return what scoring has counted of each component (``truncated/NAME`` ...), as numbers of the row."""
    found = {}
    for name, count in counted.items():
        what, _, component = name.partition("/")
        if count:
            found[f"evaluate/reward/{component}/{what}"] = count
    return found


def without_sets(prompts: pa.Table, num_samples: int) -> tuple[pa.Table, list[str]]:
    """Split off the name of each response's set, which rules are not given; none where there is one set."""
    if HELDOUT_SET not in prompts.column_names:
        return prompts, []
    names = prompts[HELDOUT_SET].to_pylist()
    return prompts.drop_columns([HELDOUT_SET]), [name for name in names for _ in range(num_samples)]


def sampling_of(config: Config, stop_ids: tuple[int, ...]) -> Sampling:
    """Return how responses are sampled; the greedy ones' own settings are those of no sampling."""
    given, rollout = config.evaluate, config.rollout
    if given.samples_per_prompt is None:
        return Sampling(stop_token_ids=stop_ids)
    return Sampling(
        rollout.temperature if given.temperature is None else given.temperature,
        rollout.top_p if given.top_p is None else given.top_p,
        rollout.top_k if given.top_k is None else given.top_k,
        stop_token_ids=stop_ids,
    )


def sampled_of(config: Config) -> Sampled | None:
    """Return what is counted of several samples; None for greedy responses."""
    given = config.evaluate
    if given.samples_per_prompt is None:
        return None
    return Sampled(given.samples_per_prompt, given.pass_at_all, given.solved_at)
