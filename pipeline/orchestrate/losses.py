"""What a pass sees where weights are gone that the run needs (:mod:`pipeline.run.losses`). By that
:func:`~pipeline.orchestrate.reconcile.reconcile` takes all updates back since the newest point from which the
run can go on, or ends the run, saying what is left.
"""

from pipeline.orchestrate.reconcile import Lost, Observation, needed_by
from pipeline.run.directory import Run
from pipeline.run.losses import find_loss, in_sentences
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.records import Records
from pipeline.run.states import keeps_state


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
