"""States of the trainer that were promised and are not there, and what came of learning them again: said
once, in the journal and to people.
"""

from collections.abc import Callable, Collection, Iterator

from pipeline.run import journal, replays
from pipeline.run.commits import Record
from pipeline.run.directory import Run
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.records import Records, is_committed
from pipeline.run.tasks import Task, task_key

LOST = "state_lost"
"""Name of the journal's event; its ``iteration`` says whose state."""
LEARNED_AGAIN = "learned_again"
"""Name of the event of an update, its ``iteration``, that learned iterations before it again."""


def note_lost_states(
    run: Run, records: Records, updated: int, live: Collection[Task], note: Callable[[str], None]
) -> None:
    """Report each state that no attempt is left to commit, once.

    Args:
        updated: newest iteration whose update is committed.
        live: tasks with an attempt that is queued or running, asked for before records were read.
    """
    for record in _promising(run, records, updated):
        state = state_of(record.task.iteration)
        is_due = record.task in live or is_committed(run.paths, state)
        if is_due or _is_said(run, record, state):
            continue
        why = f"{record.task} committed its policy, and ended before the trainer's state was saved"
        journal.event(run.paths.events, LOST, iteration=state.iteration, attempt=record.attempt, message=why)
        goes_on = (
            "; the next update has it in memory, or learns it again"
            if state.iteration < run.plan.iterations
            else ""
        )
        note(f"{why}{goes_on}")


def _promising(run: Run, records: Records, updated: int) -> Iterator[Record]:
    """Yield the newest two updates that promised a state: one before them was needed, and is made up for."""
    for version in range(max(updated - 1, run.plan.start + 1), updated + 1):
        record = records.readable(policy_maker(version))
        if record is not None and record.promises_state:
            yield record


def _is_said(run: Run, record: Record, state: Task) -> bool:
    """Whether the journal tells of this loss: as such, or as a state that was taken back."""
    for event in journal.read_since(run.paths.events, record.ended):
        is_lost = event.get("event") == LOST and event.get("attempt") == record.attempt
        if is_lost or (event.get("event") == "retracted" and event.get("task") == task_key(state)):
            return True
    return False


def note_replay(run: Run, update: Record | None, note: Callable[[str], None]) -> None:
    """Report what came of learning iterations again before an update, once: in the journal, and to
    people where it deserves their attention.

    Args:
        update: the update's record, if it can be read.
    """
    if update is None or not update.metrics.keys() >= replays.METRICS:
        return
    known = journal.read_since(run.paths.events, update.ended)
    if any(event.get("event") == LEARNED_AGAIN and event.get("attempt") == update.attempt for event in known):
        return
    level, text = replays.level_of(update.metrics), replays.in_words(update.metrics)
    journal.event(
        run.paths.events,
        LEARNED_AGAIN,
        iteration=update.task.iteration,
        attempt=update.attempt,
        iterations=int(update.metrics[replays.REPLAYED]),
        difference=update.metrics[replays.DIFFERENCE],
        level=level,
        message=text,
    )
    if level is not replays.Level.INFO:
        note(f"{level}: before {update.task} {text}")
