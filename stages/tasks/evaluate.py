"""Evaluate: responses to held-out prompts, greedy or sampled, scored like a rollout."""

import math
import statistics as stats
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipeline.config.schema import Config
from pipeline.run.schemas import (
    ENVIRONMENT_TASK,
    GREEDY_SAMPLE,
    HELDOUT_SET,
    PROMPTS,
    ROLLOUT,
    component_column,
    environment_of,
    version_of,
)
from pipeline.run.shards import write_shard
from pipeline.run.tasks import PREPARE, Task
from stages.context import Context, StageResult, UserError
from stages.engines.base import Sampling
from stages.generation.responding import respond, response_metrics
from stages.models.tokenizers import stop_ids_of
from stages.rewards.components import component_scores
from stages.tasks.reward import reward_table


@dataclass(frozen=True)
class Sampled:
    """How responses were sampled, and what of it is counted."""

    num_samples: int
    """Responses to each prompt, side by side."""
    pass_at: Sequence[int] = ()
    """Values of k for pass@k."""
    solved_at: float = 1.0
    """Least reward of a response that counts as solved."""


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the probability that one of ``k`` samples at least is solved, estimated without bias from
    ``num_samples`` of which ``num_solved`` are: 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374)."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs k from 1 to {num_samples}, the number of samples")
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def evaluation_numbers(
    scores: Mapping[str, Sequence[float | None]], sets: Sequence[str], sampled: Sampled | None
) -> dict[str, float]:
    """Return metrics of all responses, and of each set of prompts.

    Args:
        scores: ``reward`` and its components, one number per response; None where a reward model could not
            take it, which no mean counts, and which solves nothing.
        sets: name of each response's set; empty where there is one set only.
        sampled: None for greedy responses.
    """
    found = _numbers("evaluate", scores, sampled)
    for name in dict.fromkeys(sets):
        chosen = [index for index, of_response in enumerate(sets) if of_response == name]
        picked = {key: [values[i] for i in chosen] for key, values in scores.items()}
        found |= _numbers(f"evaluate/{name}", picked, sampled)
    return found


def _numbers(
    prefix: str, scores: Mapping[str, Sequence[float | None]], sampled: Sampled | None
) -> dict[str, float]:
    known = {name: [value for value in values if value is not None] for name, values in scores.items()}
    found = {f"{prefix}/{name}": stats.fmean(values) for name, values in known.items() if values}
    if sampled is None:
        return found
    size, rewards = sampled.num_samples, scores["reward"]
    if known["reward"]:
        found[f"{prefix}/mean@{size}"] = found[f"{prefix}/reward"]
    groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
    solved = [sum(reward is not None and reward >= sampled.solved_at for reward in group) for group in groups]
    for k in sampled.pass_at:
        found[f"{prefix}/pass@{k}"] = stats.fmean(pass_at_k(size, count, k) for count in solved)
    return found


def run(task: Task, context: Context) -> StageResult:
    config = context.config
    context.read(PREPARE)
    prompts = context.table(PREPARE, PROMPTS, "heldout")
    if prompts.num_rows == 0:
        raise UserError("there is no usable held-out prompt (data.heldout, data.environment)")
    count = config.evaluate.samples_per_prompt
    samples = [GREEDY_SAMPLE] if count is None else list(range(count))
    prompts, sets = without_sets(prompts, len(samples))
    sets = sets or environments_of(config, prompts, len(samples))
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
    return StageResult((output,), rows.num_rows, version_of(ROLLOUT), task.iteration, metrics)


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


def environments_of(config: Config, prompts: pa.Table, num_samples: int) -> list[str]:
    """Return the name of each response's environment; none where the run has not several."""
    if config.data.environment is None or len(config.data.environment.components) == 1:
        return []
    names = map(environment_of, prompts[ENVIRONMENT_TASK].to_pylist())
    return [name for name in names for _ in range(num_samples)]


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
