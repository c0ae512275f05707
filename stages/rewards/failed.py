"""The share of responses at which a rule with ``on_error=score`` may fail: ``max_failed`` of an iteration's,
however they are divided among shards, and of an evaluation's, which is one task.

A reward task ends where its own shard has more than the whole iteration may have. What only all shards
together have is found by the update, where they meet.
"""

from collections.abc import Mapping

from pipeline.config.algorithm import Estimator
from pipeline.config.reward import OnError, RuleConfig
from pipeline.config.schema import Config
from pipeline.run.commits import Record, require_record
from pipeline.run.tasks import Stage, Task
from stages.context import Context, UserError


def rows_judged(config: Config, task: Task, num_rows: int) -> int:
    """Return the number of responses that ``max_failed`` is a share of, where a task scores ``num_rows``."""
    if not task.stage.is_sharded:
        return num_rows
    has_greedy = config.algorithm.estimator is Estimator.REMAX
    return config.prompts_per_rollout * (config.rollout.samples_per_prompt + has_greedy)


def check_failed_share(context: Context, iteration: int) -> None:
    """Check that no rule has failed at more of an iteration's responses than it may.

    Raises:
        NotCommitted, CorruptData: a record of a shard's scores cannot be read.
        UserError: naming the component and the shard with most of them.
    """
    for name, rule in context.config.reward.components.items():
        if isinstance(rule, RuleConfig) and rule.on_error is OnError.SCORE:
            _check_share(name, rule, scored_by(context, iteration, rule.pool))


def scored_by(context: Context, iteration: int, pool: str | None) -> dict[int, Record]:
    """Return the records of the tasks that score the components of a pool (None: none), by shard."""
    stage = Stage.SCORE if pool else Stage.REWARD
    shards = range(context.config.rollout.num_shards)
    return {
        shard: require_record(context.paths, Task(iteration, stage, shard, pool or "")) for shard in shards
    }


def _check_share(name: str, rule: RuleConfig, records: Mapping[int, Record]) -> None:
    failed = {shard: int(record.metrics.get(f"failed/{name}", 0)) for shard, record in records.items()}
    num_failed, num_rows = sum(failed.values()), sum(record.rows for record in records.values())
    if num_failed <= rule.max_failed * num_rows:
        return
    shard = max(failed, key=lambda one: failed[one])
    task = records[shard].task
    point = f"{task.job_kind}@{task.iteration}"
    raise UserError(
        f"reward component {name!r} ({rule.function}) failed at {num_failed} of {num_rows} responses of "
        f"iteration {task.iteration}, a larger share than max_failed={rule.max_failed:g}; "
        f"slurm-ppo logs RUN {point} shows the first of each shard (most, {failed[shard]}, are in shard "
        f"{shard}); fix the rule and go on with slurm-ppo resume RUN --from {point}"
    )
