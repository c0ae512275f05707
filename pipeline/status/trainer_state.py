"""The trainer's state: of the newest iteration that is done, where it is promised and not committed; and how
well one was learned again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.run.commits import Record
from pipeline.run.plan import Plan, policy_maker, state_of
from pipeline.run.records import Frontier, Records, is_committed
from pipeline.run.replays import Level
from pipeline.run.troubles import LEARNED_AGAIN


@dataclass(frozen=True)
class Missing:
    """A state that was promised, and is not committed."""

    iteration: int
    is_lost: bool
    """Whether no attempt is left that could commit it. If not, it is being written."""
    writer: str = ""
    """Job that writes it, in words; empty for a process of this machine."""


@dataclass(frozen=True)
class Writer:
    """Attempt that writes a state, as far as is known."""

    is_at_work: bool | None
    """None where that is not known."""
    words: str = ""


def promising(plan: Plan, records: Records, frontier: Frontier) -> Record | None:
    """Return the newest update that is done, if the state behind it is promised and not committed.

    Args:
        records: hold that update's record.
    """
    if frontier.updated <= plan.start:
        return None
    update = records.known.get(policy_maker(frontier.updated))
    is_due = update is not None and update.promises_state
    return None if not is_due or is_committed(records.paths, state_of(frontier.updated)) else update


def missing_state(update: Record | None, writer: Writer, is_said_lost: bool) -> Missing | None:
    """Say what became of a state; None where nothing is missing, or nothing is known of it. Pure.

    Args:
        update: from :func:`promising`.
        is_said_lost: whether the journal says so.
    """
    if update is None or (writer.is_at_work is None and not is_said_lost):
        return None
    is_lost = is_said_lost or writer.is_at_work is False
    return Missing(update.task.iteration, is_lost, "" if is_lost else writer.words)


def in_words(missing: Missing, iterations: int) -> str:
    """Return a line for a person; ``iterations`` is the number of the run's."""
    state = f"the trainer's state of iteration {missing.iteration}"
    if missing.is_lost:
        is_last = missing.iteration == iterations
        follows = "no update follows that needs it" if is_last else "the next update learns it again"
        return f"{state} was lost; {follows}"
    return f"{state} is being written" + (f" ({missing.writer})" if missing.writer else "")


def replay_in_words(event: Mapping[str, Any]) -> str:
    """Describe an event of :data:`LEARNED_AGAIN`. Raises KeyError where it lacks something."""
    return f"{event['level']}: before update {event['iteration']} {event['message']}"


def doubtful_replay(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Return in words the newest replay among events, if it deserves a person's attention."""
    newest = next((event for event in reversed(events) if event.get("event") == LEARNED_AGAIN), None)
    is_doubtful = newest is not None and newest.get("level") in (Level.WARNING, Level.ERROR)
    return replay_in_words(newest) if newest is not None and is_doubtful else None
