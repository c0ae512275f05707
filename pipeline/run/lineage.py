"""Lineage of a run's policies: whether each was made from the one before, from the first to the newest."""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.run.commits import CorruptData, Record, read_record, require_record, verify_outputs
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.tasks import task_key


@dataclass(frozen=True)
class Break:
    """Update that is not valid, and with it everything that was made from it."""

    iteration: int
    why: str


def find_break(plan: Plan, paths: RunPaths, updated: int) -> Break | None:
    """Find the first update that was not made from the policy before it, reading one record per update.

    Records that are lost are passed over: what they said cannot be known, and nothing needs them any more.

    Args:
        updated: the newest iteration whose update is committed.
    """
    before: Record | None = None
    for record in _updates(plan, paths, updated):
        if before is not None and record is not None:
            read = record.inputs.get(task_key(before.task))
            if read is not None and read != before.fingerprint:
                why = f"{record.task} was made from another {before.task} than there is"
                return Break(record.task.iteration, why)
        before = record
    return None


def find_damage(plan: Plan, paths: RunPaths, updated: int) -> Break | None:
    """Read and hash the last policy of a run that is trained to its end, since no task of the run will."""
    if updated < plan.iterations or updated == plan.start:
        return None
    try:
        verify_outputs(paths, require_record(paths, policy_maker(updated)))
    except CorruptData as error:
        return Break(updated, str(error))
    return None


def _updates(plan: Plan, paths: RunPaths, updated: int) -> Iterator[Record | None]:
    for iteration in range(max(plan.start, 1), updated + 1):
        try:
            yield read_record(paths, policy_maker(iteration))
        except CorruptData:
            yield None
