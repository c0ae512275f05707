"""A learner that stays in memory from one update to the next one of the same process.

What follows must be the same to the last bit as if everything were loaded. So a learner is used again only by
the iteration after its own, if the committed update is its own attempt; its counters come from that commit.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.config.algorithm import ReferenceStage
from pipeline.config.engine_rules import has_reference_in
from pipeline.config.schema import Config
from pipeline.run.commits import BadCommit, FileEntry, fingerprint_of, read_record, require_record
from pipeline.run.plan import policy_maker, state_of
from stages import ranks
from stages.context import Context
from stages.models.devices import device
from stages.ppo.saving import save_state
from stages.ppo.state.writer import free_device
from stages.ppo.training import Learner, say
from stages.process import background


@dataclass(frozen=True)
class Kept:
    """A learner, as it was when its policy was written, or loaded as it was then."""

    context: Context
    """That of the attempt that has written the policy."""
    learner: Learner
    newest: int
    """Version of the newest state that was committed before this update."""
    seconds: float
    """Duration of the updates since that state."""
    fingerprint: str
    """Fingerprint of what the attempt has to commit; only the first rank knows it."""

    @property
    def version(self) -> int:
        return self.context.task.iteration


_kept: Kept | None = None
_in_use: Learner | None = None
"""Learner of an update that is running, or has failed: DeepSpeed holds on to it."""


def use(learner: Learner) -> None:
    """Note that an update is running with a learner."""
    global _in_use
    _in_use = learner


def is_there() -> bool:
    """Whether a learner is kept."""
    return _kept is not None


def can_stay(config: Config) -> bool:
    """Whether a learner may stay. Not where the update also loads the reference, which would be in memory
    beside it: a run that fits into its GPUs without workers would not fit with them."""
    return not has_reference_in(config, ReferenceStage.UPDATE)


def keep(
    context: Context, learner: Learner, outputs: Sequence[FileEntry], newest: int, seconds: float
) -> None:
    """Keep a learner whose policy is written and is to be committed with these outputs."""
    global _kept
    if context.stays and can_stay(context.config):
        fingerprint = fingerprint_of(outputs, context.attempt)
        _kept = Kept(replace(context, state_writer=None), learner, newest, seconds, fingerprint)


def adopt(context: Context, learner: Learner, version: int) -> None:
    """Keep a learner that was loaded as the update that made ``version`` left it."""
    global _kept
    record = require_record(context.paths, policy_maker(version))
    made = replace(context, task=record.task, attempt=record.attempt)
    _kept = Kept(made, learner, version, 0.0, record.fingerprint)


def take(context: Context, version: int) -> Kept | None:
    """Return the learner that is kept if version ``version`` is what it has made, and keep it no longer; else
    drop it. Every rank takes part, and all have it or none."""
    global _kept
    found, _kept = _kept, None
    is_ours = all(ranks.share(found is not None and _is_committed(found, context, version)))
    if found is None:
        return None
    if not is_ours:
        release()
        return None
    say(f"going on from memory, where the learner of iteration {version} is")
    newest = ranks.share(_newest_state(found))[0]
    return replace(found, newest=newest, seconds=0.0 if newest == version else found.seconds)


def _is_committed(kept: Kept, context: Context, version: int) -> bool:
    """Whether a learner has made what is committed as a version."""
    made = kept.context
    if (made.paths, made.task, made.config) != (context.paths, policy_maker(version), context.config):
        return False
    try:
        record = read_record(context.paths, made.task)
    except (BadCommit, OSError):  # of one rank alone: the others wait for its answer
        return False
    if record is None or record.attempt != made.attempt:
        return False
    return record.fingerprint == kept.fingerprint or not ranks.is_first()


def _newest_state(kept: Kept) -> int:
    """Return the newest version with a state. One that was due may have been lost as it was written."""
    try:
        is_there = read_record(kept.context.paths, state_of(kept.version)) is not None
    except (BadCommit, OSError):
        is_there = False
    return kept.version if is_there else kept.newest


def save() -> None:
    """Commit the state of the learner that is kept, unless that is done: for a process that is about to
    leave, whose successor would have to learn it again. Every rank takes part. Never fails."""
    kept = _kept
    is_wanted = kept is not None and _is_committed(kept, kept.context, kept.version)
    is_wanted = is_wanted and kept is not None and _newest_state(kept) != kept.version
    is_wanted = is_wanted and background.at_work() is None
    if all(ranks.share(is_wanted)) and kept is not None:
        save_state(kept.context, kept.learner, kept.version)


def seconds_to_save() -> float:
    """Return the seconds that :func:`save` takes, by the newest state that is there; 0 if it has nothing to
    do, or none was written yet."""
    if _kept is None or (newest := _newest_state(_kept)) == _kept.version:
        return 0.0
    try:
        record = read_record(_kept.context.paths, state_of(newest)) if newest > 0 else None
    except (BadCommit, OSError):
        return 0.0
    return 0.0 if record is None else max(0.0, record.ended - record.started)


def release() -> None:
    """Drop what is kept: after a task that failed, or before memory is needed for something else."""
    global _kept, _in_use
    learner, _kept, _in_use = _in_use, None, None
    if learner is not None:
        _drop(learner)


def _drop(learner: Learner) -> None:
    """Give the memory back: a GPU's whole, the host's but for buffers that DeepSpeed never lets go of."""
    for trainer in learner.trainers:
        trainer.free()
    gc.collect()
    if device().type != "cpu":
        free_device()
