"""Trainers' states: which versions have one, and from which one learning can get to a version.

A state is committed behind its policy (:attr:`Stage.STATE`), or with it (:attr:`Record.holds_state`). One
that is lost costs time, not the run: what was learnt since an earlier state is learnt again.
"""

import math
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.run import inside
from pipeline.run.commits import CorruptData, Record, read_record, thinned_folders
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan, policy_maker, state_of
from pipeline.run.tasks import Task
from slurm.sharedfiles import names_in

FOLDER = re.compile(r"(\d{5,})\..+")
"""Name of an attempt's folder below ``policy/``, ``state/`` and the like; its group is the version."""


def state_record(paths: RunPaths, version: int) -> Record | None:
    """Return the record that a version's state was committed with, behind its policy or with it; None where
    there is none, or its files were pruned.

    Raises:
        CorruptData: a record cannot be read; names its task.
    """
    record = _kept_record(paths, state_of(version), "state")
    if record is None:
        record = _kept_record(paths, policy_maker(version), "trainer")
        return record if record is not None and record.holds_state else None
    return record


def has_state(paths: RunPaths, version: int) -> bool:
    """Whether a version has a state, as :func:`state_record`, of which all records can be read."""
    try:
        return state_record(paths, version) is not None
    except CorruptData:
        return False


def has_policy(paths: RunPaths, version: int) -> bool:
    """Whether the policy is committed, and was not pruned. Version 0 is the user's."""
    return version == 0 or _stands(paths, policy_maker(version), "policy") is not None


def _stands(paths: RunPaths, task: Task, parent: str) -> Record | None:
    """Return the task's record if it can be read and nothing of it below ``parent`` was pruned."""
    try:
        return _kept_record(paths, task, parent)
    except CorruptData:
        return None


def _kept_record(paths: RunPaths, task: Task, parent: str) -> Record | None:
    """Return the task's record unless something of it below ``parent`` was pruned."""
    record = read_record(paths, task)
    if record is None:
        return None
    gone = {folder.split("/")[0] for folder in thinned_folders(paths, task)}
    return None if parent in gone else record


def keeps_state(record: Record) -> bool:
    """Whether the trainer that made an update keeps a state; one of a user's may keep none."""
    return record.promises_state or record.holds_state or record.skips_state


def is_due(config: Config, version: int, newest: int, seconds: float) -> bool:
    """Whether an update is to save its state (update.save_every). Pure.

    Args:
        newest: version of the newest state before it; 0 where learning began.
        seconds: duration of the updates since that state, this one included.
    """
    every, interval = config.update.keep_every, config.update.save_every
    is_kept = version == config.iterations or (every is not None and version % every == 0)
    return is_kept or version - newest >= interval or seconds >= longest_replay(config)


def too_rare(config: Config, seconds: float) -> str | None:
    """Say why states are saved too rarely (update.save_every); None if they are not: an update that has to
    learn others again shall have half of its time for itself. Pure.

    Args:
        seconds: duration of an update, as measured.
    """
    every, limit = config.update.save_every, config.scheduler.update_seconds
    in_time = math.ceil(min(longest_replay(config) / seconds, every)) if seconds else every
    count = min(every, in_time)  # until a state is due
    if every == 1 or count * seconds <= limit / 2:
        return None
    return (
        f"updates took {seconds:.0f} s, so that learning {count} again takes {count * seconds:.0f} s, more "
        f"than half of the update's time limit ({limit:.0f} s); leave it at 1, or raise the limit"
    )


def longest_replay(config: Config) -> float:
    """Return the seconds of updates after which a state is saved: an update that learns them again has most
    of its time left."""
    return config.scheduler.update_seconds / 4


def versions_with_state(paths: RunPaths) -> Iterator[int]:
    """Yield the versions that have a state, newest first."""
    found = {version for parent in (paths.states, paths.trainers) for version, _ in _folders(parent)}
    return (version for version in sorted(found, reverse=True) if has_state(paths, version))


def _folders(parent: Path) -> Iterator[tuple[int, Path]]:
    """Yield the folders of attempts below ``parent``, with their versions."""
    for name in names_in(parent):
        if match := FOLDER.fullmatch(name):
            yield int(match[1]), parent / name


def state_before(plan: Plan, paths: RunPaths, version: int) -> int | None:
    """Return the newest state from which learning can get to ``version``, by doing the iterations in between
    again; None if there is none. Version 0 needs no state."""
    while has_policy(paths, version):
        if version == 0 or has_state(paths, version):
            return version
        if version == plan.start:
            break
        version -= 1
    return None


def can_go_on(plan: Plan, paths: RunPaths, version: int) -> bool:
    """Whether the next iteration can be learnt from what is there of a committed version."""
    if version == 0:
        return True
    update = _stands(paths, policy_maker(version), "policy")
    return update is not None and (not keeps_state(update) or state_before(plan, paths, version) is not None)


def can_roll_out(plan: Plan, paths: RunPaths, iteration: int) -> bool:
    """Whether all older policies are there of which the responses of an iteration, and of those that follow
    it, are: with staleness more than the one that it goes on from."""
    older = range(plan.policy_of(iteration), iteration - 1)
    return all(has_policy(paths, version) for version in older)


def has_references(plan: Plan, paths: RunPaths, iteration: int) -> bool:
    """Whether the references are there that an iteration reads: the user's model, or what was not pruned."""
    return all(version == 0 or _has_reference(paths, version) for version in plan.references_of(iteration))


def _has_reference(paths: RunPaths, version: int) -> bool:
    return has_policy(paths, version) and _stands(paths, policy_maker(version), "reference") is not None


def can_fork(paths: RunPaths, version: int) -> bool:
    """Whether a fork can begin with a committed version: its state is there, if its trainer keeps any."""
    update = _stands(paths, policy_maker(version), "policy")
    return update is not None and (not keeps_state(update) or has_state(paths, version))


def oldest_needed(plan: Plan, paths: RunPaths, newest: int) -> int:
    """Return the version of the second-newest state. Policies and shards after it stay: should the newest be
    lost, they are what it is made again from. Where the trainer keeps no state, ``newest``.

    Args:
        newest: a committed version, or the one that the run begins with.
    """
    there = list(islice(versions_with_state(paths), 2))
    if len(there) == 2:
        return there[1]
    if there:
        return plan.start
    try:
        record = read_record(paths, policy_maker(newest)) if newest > plan.start else None
    except CorruptData:
        return plan.start
    return plan.start if record is None or keeps_state(record) else newest


def remove_unfinished(paths: RunPaths, version: int) -> None:
    """Remove what attempts that were killed have written of a state, and the claims on the update. Only for a
    version whose attempts have all ended."""
    for claim in paths.task(policy_maker(version)).claims():
        claim.unlink(missing_ok=True)
    folders = [folder for of_version, folder in _folders(paths.states) if of_version == version]
    if not folders:
        return
    try:
        record = read_record(paths, state_of(version))
    except CorruptData:  # which folder is its own cannot be known; it is moved aside once it is needed
        return
    named = {entry.folder for entry in record.outputs} if record else set()
    for folder in folders:
        if paths.relative(folder) not in named:
            inside.remove(paths.root, folder)
    for private in paths.task(state_of(version)).folder.glob(".*"):  # of one that was killed as it committed
        private.unlink(missing_ok=True)
