"""Update: train on an iteration's scored responses, and commit the next policy. ``update.engine`` says with
what.
"""

from dataclasses import replace

from pipeline.data.summary import row_counts
from pipeline.run.tasks import PREPARE, Task
from stages.context import Context, StageResult
from stages.engines import make_trainer
from stages.process import background
from stages.rewards.failed import check_failed_share
from stages.tasks.dealing import save_standing


def run(task: Task, context: Context) -> StageResult | None:
    """Train. Returns None on every rank but the first, which has the result of all of them.

    What prepare has counted in the prompt files is among its metrics too: so it is in every row.
    """
    prepared = context.read(PREPARE)
    check_failed_share(context, task.iteration)
    with background.before_termination():
        result = make_trainer(context.config).update(context, task.iteration)
    if result is None:
        return None
    outputs, metrics = result.outputs, {**row_counts(prepared.metrics), **result.metrics}
    if context.config.data.band.is_given:
        outputs += (save_standing(context, task.iteration),)
    return replace(result, outputs=outputs, metrics=metrics)


def load(context: Context, version: int) -> None:
    """Have the trainer load what the previous iteration left, if that is complete. Every rank takes part."""
    make_trainer(context.config).load(context, version)
