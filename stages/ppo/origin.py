"""The trainer's state that a fork begins with, learned by the fork where its parent saved none."""

import shutil
from dataclasses import replace

from pipeline.run.adoption import adopt
from pipeline.run.commits import read_record
from pipeline.run.directory import load_run
from pipeline.run.plan import state_of
from pipeline.run.states import has_origin, has_state
from stages import ranks
from stages.context import Context, Stopwatch
from stages.ppo import kept
from stages.ppo.replay import Relearned
from stages.ppo.resuming import loaded
from stages.ppo.saving import save_state
from stages.ppo.training import say


def learn_first_state(context: Context, first: int) -> Relearned | None:
    """Learn and commit the state of the version that a fork begins with, by the parent's configuration, from
    what the fork took along (:mod:`pipeline.run.origin`). Every rank takes part.

    Returns:
        What came of it; None where there is nothing to do, as mostly.

    Raises:
        OSError: the state could not be saved.
    """
    is_wanted = has_origin(context.paths) and not has_state(context.paths, first)
    if not ranks.share(is_wanted)[0]:
        return None
    say(f"the fork's parent saved no trainer's state of iteration {first}: it is learned by its settings")
    parent = load_run(context.paths.origin)
    reader = replace(context, paths=parent.paths, config=parent.config, lineage={}, stopwatch=Stopwatch())
    kept.release()
    learner, relearned = loaded(reader, first)
    if relearned.newest < first:
        save_state(reader, learner, first)
    kept.release()
    error = None
    if ranks.is_first():
        if (state := read_record(parent.paths, state_of(first))) is not None:
            adopt(parent, state, context.paths)
            shutil.rmtree(parent.paths.root)
        else:
            error = OSError(
                f"the trainer's state of iteration {first}, with which the fork begins, is not saved"
            )
    ranks.agree(error)
    return relearned
