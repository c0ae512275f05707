"""The trainer that a process keeps between updates, for code that knows nothing of trainers.

Imports nothing heavy: where no trainer was used there is nothing to do.
"""

import sys

from stages.process import background


def finish_state() -> None:
    """Wait, but not for ever, until a thread has written the state that it is at. Each rank waits for its
    own thread."""
    background.leave()


def is_writing_state(attempt: str) -> bool:
    """Whether a thread writes the state that an attempt has left."""
    label = background.at_work()
    return label is not None and label.attempt == attempt


def bytes_of_state() -> float:
    """Return the bytes that the process holds only until they are written."""
    label = background.at_work()
    return label.num_bytes if label else 0.0


def save_kept_trainer() -> None:
    """Commit the trainer's state, if it is in memory alone, before the process leaves as planned. Every rank
    of an update takes part. Never fails."""
    if module := sys.modules.get("stages.ppo.kept"):
        module.save()


def has_kept_trainer() -> bool:
    """Whether a trainer is kept, which may have a state that is in memory alone."""
    module = sys.modules.get("stages.ppo.kept")
    return module is not None and module.is_there()


def seconds_to_save_trainer() -> float:
    """Return the seconds that :func:`save_kept_trainer` takes, as far as is known."""
    module = sys.modules.get("stages.ppo.kept")
    return module.seconds_to_save() if module is not None else 0.0


def release_kept_trainer() -> None:
    """Give the trainer's memory back: after a task that failed."""
    if module := sys.modules.get("stages.ppo.kept"):
        module.release()
