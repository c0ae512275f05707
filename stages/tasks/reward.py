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
    PROMPT_SOURCE,
    REWARD,
    ROLLOUT,
    SCORE,
    STEP_REWARDS,
    Validity,
    component_column,
    conform,
    environment_of,
    is_sampled,
    teacher_columns,
    validity_counts,
    version_of,
)
from pipeline.run.shards import write_shard
from pipeline.run.tasks import PREPARE, Stage, Task
from stages.context import Context, StageResult
from stages.generation.responding import num_tokens
from stages.rewards.components import check_finite, component_scores, load_component
from stages.rewards.steps import gives_steps, scores_in, step_rewards
from stages.rewards.teachers import combined, load_first_teacher, teacher_log_probs
from stages.rewards.validity import Score, rewarded, validities


def run(task: Task, context: Context) -> StageResult:
    context.read(PREPARE)
    source = context.read(Task(task.iteration, Stage.ROLLOUT, task.shard))
    rows = context.table(source.task, ROLLOUT)
    reward = context.config.reward
    pooled, of_pools = pool_scores(context)  # before anything is computed: they may be missing or stale
    mine, metrics = component_scores(context, rows, reward.components_of(None))
    scores = {name: (pooled | mine)[name] for name in reward.components}
    teachers = of_pools | teacher_log_probs(context, rows, reward.teachers_of(None))
    reference = None
    if has_reference_in(context.config, ReferenceStage.REWARD):
        from stages.rewards.reference import reference_log_probs  # torch, which rules alone do not need

        reference = reference_log_probs(context, rows)
    extra = combined(reward.teachers, teachers)
    table = reward_table(context.config, rows, scores, reference, extra)
    output = write_shard(context.paths, context.files.data(context.attempt), table)
    metrics["responses"] = float(pc.sum(is_sampled(rows)).as_py())
    metrics |= validity_metrics(table)
    metrics["response_tokens"] = num_tokens(rows)
    metrics |= by_origin(rows, table)
    return StageResult((output,), rows.num_rows, version_of(REWARD), source.policy_version, metrics)


def load(context: Context, version: int) -> None:
    """Load the first reward model, which may have to leave before the next is loaded, and the reference if
    it fits beside that; without either a teacher."""
    name = load_component(context, context.config.reward.components_of(None))
    is_there = context.reference_of(context.task.iteration) <= version
    is_wanted = is_there and has_reference_in(context.config, ReferenceStage.REWARD)
    if is_wanted and name in (None, Engine.TRANSFORMERS):
        from stages.rewards.reference import load_reference

        load_reference(context)
    elif name is None:
        load_first_teacher(context, context.config.reward.teachers_of(None))


def by_origin(rows: pa.Table, rewards: pa.Table) -> dict[str, float]:
    """Return the sum of rewards, and their number, of each environment and each file of prompts, and of files
    the number of samples of each validity; none where no environment made the prompts, and the file has no
    name. Greedy responses do not count, nor in sums those without a reward."""
    found: dict[str, float] = {}
    if ENVIRONMENT_TASK in rows.column_names:
        names = list(map(environment_of, rows[ENVIRONMENT_TASK].to_pylist()))
        found |= _reward_sums("environment", names, rewards)
    if PROMPT_SOURCE in rows.column_names:
        names = rows[PROMPT_SOURCE].to_pylist()
        found |= _reward_sums("source", names, rewards)
        for name in dict.fromkeys(names):
            counts = validity_counts(rewards.filter(pc.equal(rows[PROMPT_SOURCE], name)))
            found |= {f"validity/{one}/{name}": float(count) for one, count in sorted(counts.items())}
    return found


def _reward_sums(what: str, names: Sequence[str], rewards: pa.Table) -> dict[str, float]:
    """Return the sum of rewards, and their number, by the name of each row's origin."""
    found: Counter[str] = Counter()
    values, samples = rewards["reward"].to_pylist(), is_sampled(rewards).to_pylist()
    for name, reward, counts in zip(names, values, samples, strict=True):
        if counts and reward is not None:
            found[f"{what}_rewards/{name}"] += reward
            found[f"{what}_responses/{name}"] += 1
    return {name: float(value) for name, value in found.items()}


def validity_metrics(rewards: pa.Table) -> dict[str, float]:
    """Count the samples of each validity that occurs, and those without a reward, or without a baseline."""
    counts = validity_counts(rewards)
    metrics = {"unscored": float(sum(n for one, n in counts.items() if not one.has_reward))}
    occurring = (one for one in Validity if counts[one] or one is Validity.SCORED)
    return metrics | {f"validity/{one}": float(counts[one]) for one in occurring}


def pool_scores(context: Context) -> tuple[dict[str, list[Score]], dict[str, pa.ChunkedArray]]:
    """Return one score per row of this task's rollout shard, by component that has a pool, and the columns of
    teachers that have one."""
    scores: dict[str, list[Score]] = {}
    teachers: dict[str, pa.ChunkedArray] = {}
    for pool in context.config.reward.pools:
        task = context.task._replace(stage=Stage.SCORE, pool=pool)
        table = context.table(task, SCORE)
        for name in context.config.reward.components_of(pool):
            scores[name] = scores_in(table, name)
        for name in context.config.reward.teachers_of(pool):
            top_k = context.config.algorithm.distillation.top_k
            teachers |= {column: table[column] for column in teacher_columns(name, top_k)}
    return scores, teachers


def reward_table(
    config: Config,
    rows: pa.Table,
    scores: Mapping[str, Sequence[Score]],
    reference: pa.Array | None,
    teachers: pa.Table | None = None,
) -> pa.Table:
    """Return the weighted sum, each component, the reference log-probabilities and the validity, row by row,
    and the columns of ``teachers``. A row that a component could not take, or of which all abstain, has no
    sum; without components all have 0."""
    components = [config.reward.components[name] for name in scores]
    weights = [component.weight for component in components]
    may_abstain = [isinstance(component, RuleConfig) for component in components]
    by_row = zip(*scores.values(), strict=True) if scores else [()] * rows.num_rows
    found = [rewarded(values, weights, may_abstain) for values in by_row]
    total = [reward for reward, _ in found]
    check_finite("the sum of the reward components, each times its weight,", total, rows)
    columns = {component_column(name): pa.array(values, pa.float32()) for name, values in scores.items()}
    columns |= {name: teachers[name] for name in teachers.column_names} if teachers is not None else {}
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
