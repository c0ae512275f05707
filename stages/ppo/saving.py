"""Trainers' states that are committed at another time than right behind their policy."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType

from pipeline.run.commits import BadCommit, Record, opened_history, read_record
from pipeline.run.paths import RunPaths
from pipeline.run.plan import policy_maker, state_of
from stages import ranks
from stages.context import Context
from stages.logs import log
from stages.ppo.state.writer import LearnerState
from stages.ppo.training import Learner
from stages.training import publish_state


def save_state(context: Context, learner: Learner, version: int) -> bool:
    """Commit the state of a learner that is where version ``version``, which is committed, was left.

    Every rank takes part. A failure is logged only: the state can be made again.

    Returns:
        Whether there is one now, on every rank.
    """
    writer = LearnerState(replace(context, task=policy_maker(version)), learner)
    started, is_saved = time.time(), False
    try:
        with contextlib.ExitStack() as stack:
            history, update = _opened(context.paths, version, stack)
            files = writer.write(is_wanted=update is not None)
            if update is not None and files:
                outcome = publish_state(context, update, files, started, history)
                log.info(f"iteration {version}: {outcome}")
                is_saved = read_record(context.paths, state_of(version)) is not None
    except Exception:  # whatever it is: training goes on
        log.exception(f"the trainer's state of iteration {version} was not saved:")
    return bool(ranks.share(is_saved)[0])


def _opened(paths: RunPaths, version: int, stack: contextlib.ExitStack) -> tuple[int, Record | None]:
    """Open the state's folder, and read the update's record on the first rank; None where that is corrupt.

    Raises:
        OSError: the disk lets one rank do neither. Every rank raises, before any waits for another in vain.
    """
    history, update = -1, None
    with ranks.agreed(OSError), contextlib.suppress(BadCommit):
        history = stack.enter_context(opened_history(paths, state_of(version)))
        update = read_record(paths, policy_maker(version)) if ranks.is_first() else None
    return history, update


@contextlib.contextmanager
def warnings_noted() -> Iterator[Callable[[], bool]]:
    """Note SIGUSR2, which Slurm sends before the time limit and an update does not heed otherwise. Yields a
    function that says whether one has come since it was last asked. The previous handler is called, too."""
    noted, before = threading.Event(), signal.getsignal(signal.SIGUSR2)

    def note(number: int, frame: FrameType | None) -> None:
        noted.set()
        if callable(before):
            before(number, frame)

    def has_come() -> bool:
        come = noted.is_set()
        noted.clear()
        return come

    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield has_come
        return
    signal.signal(signal.SIGUSR2, note)
    try:
        yield has_come
    finally:
        signal.signal(signal.SIGUSR2, before)
