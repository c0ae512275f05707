"""Reward: score one rollout shard, add the scores that pools gave it, and compute the reference's
log-probabilities unless the update does.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.algorithm import ReferenceStage
from pipeline.config.engine_rules import has_reference_in
from pipeline.config.engines import Engine
from pipeline.config.reward import RuleConfig
from pipeline.config.schema import Config
from pipeline.run.schemas import (
    ENVIRONMENT_TASK,
    REWARD,
    ROLLOUT,
    SCORE,
    STEP_REWARDS,
    Validity,
    component_column,
    conform,
    environment_of,
    is_sampled,
    validity_counts,
    version_of,
)
from pipeline.run.shards import write_shard
from pipeline.run.tasks import PREPARE, Stage, Task
from stages.context import Context, StageResult
from stages.generation.responding import num_tokens
from stages.rewards.components import check_finite, component_scores, load_component
from stages.rewards.steps import gives_steps, scores_in, step_rewards
from stages.rewards.validity import Score, rewarded, validities


def run(task: Task, context: Context) -> StageResult:
    context.read(PREPARE)
    source = context.read(Task(task.iteration, Stage.ROLLOUT, task.shard))
    rows = context.table(source.task, ROLLOUT)
    pooled = pool_scores(context)  # before anything is computed: they may be missing or stale
    mine, metrics = component_scores(context, rows, context.config.reward.components_of(None))
    scores = {name: (pooled | mine)[name] for name in context.config.reward.components}
    reference = None
    if has_reference_in(context.config, ReferenceStage.REWARD):
        from stages.rewards.reference import reference_log_probs  # torch, which rules alone do not need

        reference = reference_log_probs(context, rows)
    table = reward_table(context.config, rows, scores, reference)
    output = write_shard(context.paths, context.files.data(context.attempt), table)
    metrics["responses"] = float(pc.sum(is_sampled(rows)).as_py())
    metrics |= validity_metrics(table)
    metrics["response_tokens"] = num_tokens(rows)
    metrics |= by_environment(rows, table)
    return StageResult((output,), rows.num_rows, version_of(REWARD), source.policy_version, metrics)


def load(context: Context, version: int) -> None:
    """Load the first reward model, which may have to leave before the next is loaded, and the reference if
    it fits beside that."""
    name = load_component(context, context.config.reward.components_of(None))
    if has_reference_in(context.config, ReferenceStage.REWARD) and name in (None, Engine.TRANSFORMERS):
        from stages.rewards.reference import load_reference

        load_reference(context)


def by_environment(rows: pa.Table, rewards: pa.Table) -> dict[str, float]:
    """Return the sum of rewards, and their number, of each environment; none where no environment made the
    prompts. Greedy responses, and those without a reward, do not count."""
    if ENVIRONMENT_TASK not in rows.column_names:
        return {}
    found: Counter[str] = Counter()
    tasks, values = rows[ENVIRONMENT_TASK].to_pylist(), rewards["reward"].to_pylist()
    for task, reward, counts in zip(tasks, values, is_sampled(rows).to_pylist(), strict=True):
        if counts and reward is not None:
            found[f"environment_rewards/{environment_of(task)}"] += reward
            found[f"environment_responses/{environment_of(task)}"] += 1
    return {name: float(value) for name, value in found.items()}


def validity_metrics(rewards: pa.Table) -> dict[str, float]:
    """Count the samples of each validity that occurs, and those without a reward, or without a baseline."""
    counts = validity_counts(rewards)
    metrics = {"unscored": float(sum(n for one, n in counts.items() if not one.has_reward))}
    occurring = (one for one in Validity if counts[one] or one is Validity.SCORED)
    return metrics | {f"validity/{one}": float(counts[one]) for one in occurring}


def pool_scores(context: Context) -> dict[str, list[Score]]:
    """Return one score per row of this task's rollout shard, by component that has a pool."""
    scores: dict[str, list[Score]] = {}
    for pool in context.config.reward.pools:
        task = context.task._replace(stage=Stage.SCORE, pool=pool)
        table = context.table(task, SCORE)
        for name in context.config.reward.components_of(pool):
            scores[name] = scores_in(table, name)
    return scores


def reward_table(
    config: Config, rows: pa.Table, scores: Mapping[str, Sequence[Score]], reference: pa.Array | None
) -> pa.Table:
    """Return the weighted sum, each component, the reference log-probabilities and the validity, row by row.
    A row that a component could not take, or of which all abstain, has no sum."""
    components = [config.reward.components[name] for name in scores]
    weights = [component.weight for component in components]
    may_abstain = [isinstance(component, RuleConfig) for component in components]
    found = [rewarded(values, weights, may_abstain) for values in zip(*scores.values(), strict=True)]
    total = [reward for reward, _ in found]
    check_finite("the sum of the reward components, each times its weight,", total, rows)
    columns = {component_column(name): pa.array(values, pa.float32()) for name, values in scores.items()}
    if any(gives_steps(component) for component in components):
        given = zip(zip(*scores.values(), strict=True), total, rows["response_mask"].to_pylist(), strict=True)
        steps = [None if sum_ is None else step_rewards(row, weights, mask) for row, sum_, mask in given]
        columns[STEP_REWARDS] = pa.array(steps, pa.list_(pa.float32()))
    return conform(
        {
            "prompt_id": rows["prompt_id"].combine_chunks(),
            "sample_index": rows["sample_index"].combine_chunks(),
            "reward": total,
            "reference_logprobs": pa.nulls(rows.num_rows) if reference is None else reference,
            "validity": validities(rows, [one for _, one in found], config.algorithm.mask_truncated),
        },
        REWARD,
        extra=pa.table(columns),
    )
