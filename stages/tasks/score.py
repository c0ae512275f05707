"""Score: one rollout shard, by components and teachers of one pool, for its reward task to join."""

from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.run.schemas import (
    ROLLOUT,
    SCORE,
    component_column,
    conform,
    is_sampled,
    version_of,
)
from pipeline.run.shards import write_shard
from pipeline.run.tasks import PREPARE, Stage, Task
from stages.context import Context, StageResult
from stages.generation.responding import num_tokens
from stages.rewards.components import component_scores, load_component
from stages.rewards.steps import gives_steps, step_columns
from stages.rewards.teachers import load_first_teacher, teacher_log_probs
from stages.rewards.validity import Score


def run(task: Task, context: Context) -> StageResult:
    context.read(PREPARE)
    source = context.read(Task(task.iteration, Stage.ROLLOUT, task.shard))
    rows = context.table(source.task, ROLLOUT)
    reward = context.config.reward
    components = reward.components_of(task.pool)
    scores, metrics = component_scores(context, rows, components)
    teachers = teacher_log_probs(context, rows, reward.teachers_of(task.pool))
    with_steps = [name for name, component in components.items() if gives_steps(component)]
    table = score_table(rows, scores, teachers, with_steps)
    output = write_shard(context.paths, context.files.data(context.attempt), table)
    metrics["responses"] = float(pc.sum(is_sampled(rows)).as_py())
    metrics["response_tokens"] = num_tokens(rows)
    return StageResult((output,), rows.num_rows, version_of(SCORE), source.policy_version, metrics)


def load(context: Context, version: int) -> None:
    """Load the first model of the pool, which may have to leave before the next is loaded."""
    reward, pool = context.config.reward, context.task.pool
    if load_component(context, reward.components_of(pool)) is None:
        load_first_teacher(context, reward.teachers_of(pool))


def score_table(
    rows: pa.Table,
    scores: Mapping[str, Sequence[Score]],
    teachers: Mapping[str, pa.Array],
    with_steps: Collection[str] = (),
) -> pa.Table:
    """Return each component's scores, the steps of those that give some, and the columns of teachers, beside
    the names of the responses, row by row."""
    columns = {component_column(name): pa.array(values, pa.float64()) for name, values in scores.items()}
    columns |= step_columns({name: scores[name] for name in with_steps})
    columns |= teachers
    names = {column: rows[column].combine_chunks() for column in ("prompt_id", "sample_index")}
    return conform(names, SCORE, extra=pa.table(columns))
