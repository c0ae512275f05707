"""Update: train on an iteration's scored responses, and commit the next policy. ``update.engine`` says with
what.
"""

from pipeline.run.tasks import PREPARE, Task
from stages.context import Context, Result
from stages.engines import make_trainer


def run(task: Task, context: Context) -> Result | None:
    """Train. Returns None on every rank but the first, which has the result of all of them."""
    context.read(PREPARE)
    return make_trainer(context.config).update(context, task.iteration)


def load(context: Context, version: int) -> None:
    """Have the trainer load what the previous iteration left, if that is complete. Every rank takes part."""
    make_trainer(context.config).load(context, version)
