"""What is lost: states of the trainer that were promised and are not there, and what came of learning them
again, said once, in the journal and to people; and weights that the run needs.
"""

from collections.abc import Callable, Collection, Iterator

from pipeline.decide.reconcile import Lost, Observation, needed_by
from pipeline.run import journal, replays
from pipeline.run.commits import Record
from pipeline.run.directory import Run
from pipeline.run.losses import find_loss, in_sentences
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.records import Records, is_committed
from pipeline.run.states import keeps_state
from pipeline.run.tasks import Task, task_key
from pipeline.run.troubles import LEARNED_AGAIN, LOST


def note_lost_states(
    run: Run, records: Records, updated: int, saving: Collection[Task], note: Callable[[str], None]
) -> None:
    """Report each state that no attempt is left to commit, once.

    Args:
        updated: newest iteration whose update is committed.
        saving: updates whose attempts are not over (:attr:`Jobs.saving`), asked for before records were read.
    """
    for record in _promising(run, records, updated):
        state = state_of(record.task.iteration)
        is_due = record.task in saving or is_committed(run.paths, state)
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


# --- policies that are lost ------------------------------------------------------------------------------

# What a pass sees where weights are gone that the run needs (pipeline.run.losses). By that reconcile takes
# all updates back since the newest point from which the run can go on, or ends the run, saying what is
# left.


def find_lost(run: Run, seen: Observation, records: Records, updated: int) -> Lost | None:
    """Return what is gone of the weights that the next update needs; None where nothing is, or only one
    update's, which is repaired as any commit is.

    Looks closer only where that is possible: the newest policy does not verify, or has no trainer's state and
    the next update was tried in vain.
    """
    if updated <= run.plan.start or not _is_suspicious(run, seen, records, updated):
        return None
    loss = find_loss(run, updated, is_trained=updated >= run.plan.iterations)
    if loss is None or (loss.point == updated - 1 and policy_maker(updated) in seen.corrupt):
        return None
    if loss.is_of_all:
        return Lost((policy_maker(updated),), in_sentences(run, loss), is_of_all=True)
    assert loss.point is not None
    since = [policy_maker(version) for version in range(updated, loss.point, -1)]
    why = f"{loss.why}; the newest from which the run can go on is {loss.point}"
    known = records.published(since)  # with those whose records went too, by which the driver counts still
    return Lost(tuple(update for update in since if update in known), why)


def _is_suspicious(run: Run, seen: Observation, records: Records, updated: int) -> bool:
    newest, following = policy_maker(updated), policy_maker(updated + 1)
    if newest in seen.corrupt:
        return newest in needed_by(run.plan, seen)
    # One that was not tried yet may find in memory what is gone on the disk.
    if following in seen.committed or following in seen.live or not seen.failures.get(following):
        return False
    record = records.readable(newest)
    has_to_have = record is not None and keeps_state(record) and not record.holds_state
    return has_to_have and records.get(state_of(updated)) is None
