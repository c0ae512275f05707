"""The prompts of an iteration: those that its epoch deals, and how they scored, for epochs to come."""

import pyarrow as pa

from pipeline.data.band import Standing, mean_rewards, standing_after
from pipeline.data.sampler import NONE, Deal, Indices, Portion, deal_portions, portions
from pipeline.run.commits import FileEntry
from pipeline.run.paths import BAND_PART
from pipeline.run.plan import policy_maker
from pipeline.run.schemas import BAND, PROMPT_INDEX, PROMPTS, REWARD, ROLLOUT
from pipeline.run.shards import LISTING, SOURCES, write_shard
from pipeline.run.tasks import PREPARE, Stage, Task
from stages.context import Context


def dealt_to(task: Task, context: Context) -> Deal:
    """Return the prompts of a shard: of all, or by the weights of their files, without those that data.band
    leaves out."""
    config = context.config
    return deal_portions(
        portions_of(context),
        iteration=task.iteration,
        num_shards=config.rollout.num_shards,
        shard=task.shard,
        seed=config.seed,
        shuffle=config.data.shuffles_epochs,
        left_out=left_out_of(task, context),
    )


def prompts_of(dealt: Deal, context: Context) -> pa.Table:
    """Return the dealt prompts, with data.band also their indices."""
    prompts = context.rows(PREPARE, PROMPTS, dealt.indices)
    if not context.config.data.band.is_given:
        return prompts
    return prompts.append_column(PROMPT_INDEX, pa.array(dealt.indices, pa.int64()))


def left_out_of(task: Task, context: Context) -> Indices:
    """Return the indices of the prompts that the epoch of a rollout leaves out, ascending."""
    if not context.config.data.band.is_given:
        return NONE
    return standing(context, context.plan.policy_of(task.iteration)).left_out


def portions_of(context: Context) -> list[Portion]:
    """Return the portions of the usable prompts: one of each file with a weight, or one of all."""
    config = context.config
    if config.data.weights:
        return portions(context.json(PREPARE, LISTING)[SOURCES], config.prompt_shares)
    return [Portion("", 0, context.read(PREPARE).rows, config.prompts_per_rollout)]


def standing(context: Context, version: int) -> Standing:
    """Return what was committed with policy ``version`` of how prompts scored: nothing with the first of a
    run or fork.

    Raises:
        NotCommitted, CorruptData: naming the update.
    """
    task, has_some = policy_maker(version), False
    if version:
        has_some = context.read(task).find_output(BAND_PART, "arrow") is not None
    table = context.table(task, BAND, BAND_PART) if has_some else BAND.empty_table()
    return Standing.of(table, context.read(PREPARE).rows)


def save_standing(context: Context, iteration: int) -> FileEntry:
    """Write how prompts scored up to and with an iteration, under this attempt's own name, durably. Raises as
    :func:`standing`."""
    config = context.config
    scored: dict[int, float] = {}
    for shard in range(config.rollout.num_shards):
        rollouts = context.table(Task(iteration, Stage.ROLLOUT, shard), ROLLOUT)
        scored |= mean_rewards(rollouts, context.table(Task(iteration, Stage.REWARD, shard), REWARD))
    after = standing_after(
        standing(context, iteration - 1),
        scored,
        iteration,
        iteration + config.next_rolled_out,
        portions_of(context),
        config.data.band,
    )
    return write_shard(context.paths, context.files.data(context.attempt, BAND_PART), after.table())
