"""What a purge, or a person, has removed of a run's weights, and from where it can go on; and whether each of
its policies was made from the one before.

One look, from the newest iteration back: the next can be learnt from a policy whose files are there, and a
trainer's state from which learning can get to it. What was computed since is computed again, to the same
bytes. A run of which nothing learnt is left does not begin again by itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.run import journal
from pipeline.run.commits import CorruptData, Record, check_sizes, read_record, require_record, verify_outputs
from pipeline.run.directory import Run, resume_command, shown
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan, policy_maker
from pipeline.run.records import newest_row
from pipeline.run.retention import in_words, list_folders
from pipeline.run.states import has_policy, keeps_state, state_record
from pipeline.run.tasks import task_key


@dataclass(frozen=True)
class Loss:
    """Weights that are gone, and are needed."""

    point: int | None
    """Newest version from which the next iteration can be learnt; None: not even the one that the run begins
    with is there."""
    updated: int
    """Newest iteration whose update was committed."""
    start: int
    """Version that the run begins with."""
    why: str
    """What is gone, in words."""

    @property
    def is_of_all(self) -> bool:
        """Whether nothing is left of what was learnt in more than one iteration: to begin again is for people
        to decide."""
        return self.point is None or (self.point == self.start and self.updated > self.start + 1)


def find_loss(run: Run, updated: int, is_trained: bool) -> Loss | None:
    """Return what is gone that the run needs to go on after an iteration; None where nothing is.

    Args:
        updated: newest iteration whose update is committed.
        is_trained: whether it is the last, of which only the policy is needed.
    """
    plan, paths = run.plan, run.paths
    if updated <= plan.start:
        return None
    missing = why_not_whole(paths, updated)
    if is_trained and missing is None:
        return None
    point = newest_point(plan, paths, updated - is_trained)
    if point == updated:
        return None
    return Loss(point, updated, plan.start, missing or f"no trainer's state leads to policy {updated}")


def newest_point(plan: Plan, paths: RunPaths, updated: int) -> int | None:
    """Return the newest version up to ``updated`` from which the next iteration can be learnt, by records and
    sizes of files; None if there is none. Version 0 is the user's model."""
    version = updated
    while version > plan.start:
        oldest = _unbroken(plan, paths, version)
        if oldest is None:
            return version
        version = oldest - 1
    is_there = plan.start == 0 or _unbroken(plan, paths, plan.start) is None
    return plan.start if is_there else None


def _unbroken(plan: Plan, paths: RunPaths, version: int) -> int | None:
    """Return None where learning can go on from a version; else the oldest version of the policies before it
    that are there in a row, none of which it can go on from either."""
    newest = version
    while version > 0 and why_not_whole(paths, version) is None:
        record = read_record(paths, policy_maker(version))
        if record is not None and not keeps_state(record):
            return None if version == newest else version
        if _has_whole_state(paths, version):
            return None
        if version == plan.start:
            return version
        version -= 1
    return None if version == 0 else min(version + 1, newest)


def why_not_whole(paths: RunPaths, version: int) -> str | None:
    """Return what is missing of a committed policy, in words; None where it is all there."""
    try:
        record = read_record(paths, policy_maker(version))
        if record is None:
            return f"the commit record of policy {version} is gone"
        if not has_policy(paths, version):
            return f"policy {version} was pruned"
        check_sizes(paths, record)
    except CorruptData as error:
        return str(error)
    return None


def _has_whole_state(paths: RunPaths, version: int) -> bool:
    try:
        record = state_record(paths, version)
        if record is not None:
            check_sizes(paths, record)
    except CorruptData:
        return False
    return record is not None


def in_sentences(run: Run, loss: Loss) -> str:
    """Say in lines for people what is lost, what is left, and the way out."""
    rows = newest_row(journal.read_tail(run.paths.metrics), run.plan.start)
    policies = [version for version in list_folders(run.paths) if why_not_whole(run.paths, version) is None]
    left = [f"rows up to iteration {rows}"] if rows > run.plan.start else []
    left += [f"the policy of iteration {in_words(policies)}"] if policies else []
    parent = run.identity.parent
    way_out = (
        f"put back what it was forked with, from {parent.path}, or fork again"
        if parent
        else f"to begin again: {resume_command(run)} --from rollout@1"
    )
    return (
        f"{shown(run.paths.root)} cannot go on: of its {loss.updated - loss.start} iterations nothing is "
        f"left that the next could be learned from ({loss.why})\n"
        f"what is left: {' and '.join(left) or 'settings and journals'}; {way_out}"
    )


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
