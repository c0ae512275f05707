"""Stages of iterations as values: the state of each task, and what tasks of a stage add up to. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from pipeline.run.commits import Record
from pipeline.run.endings import Endings
from pipeline.run.tasks import Task, parse_task, task_key
from pipeline.workers.beats import Beat, Doing

if TYPE_CHECKING:
    from slurm.query import Element
    from slurm.reasons import WaitReason

_BEHIND_OTHERS = "Priority"


class ShardState(StrEnum):
    """State of one task, for a mark."""

    DONE = "done"
    RUNNING = "running"
    AGAIN = "again"
    """Another attempt than the first, running or waiting."""
    FAILED = "failed"
    """Last attempt ended without a commit, and none is queued."""
    WAITING = "waiting"
    IDLE = "idle"
    """No attempt at the task runs or waits in the queue."""


class TaskState(NamedTuple):
    """State of one task, on Slurm or on this machine. A tuple, since a look makes one for each shard."""

    task: Task
    record: Record | None = None
    is_running: bool = False
    is_waiting: bool = False
    """Whether it was launched and waits for a slot, or is in Slurm's queue."""
    has_failed: bool = False
    """Whether its last attempt ended without a commit, and none is queued."""
    attempts: int = 0
    """Number of times that it was submitted or launched."""
    started: float | None = None
    waited: float | None = None
    """Seconds in the queue since its inputs were there, until it started or until now."""
    element: "Element | None" = None
    """Array element in Slurm's queue: the live one, else one that ended and is still shown."""

    @property
    def shard_state(self) -> ShardState:
        if self.record:
            return ShardState.DONE
        if self.is_running or self.is_waiting:
            if self.attempts > 1:
                return ShardState.AGAIN
            return ShardState.RUNNING if self.is_running else ShardState.WAITING
        return ShardState.FAILED if self.has_failed else ShardState.IDLE


@dataclass(frozen=True)
class StageProgress:
    """Progress of one stage of one iteration, or of one pool's scores.

    Shards in none of the four counts were not submitted, or were cancelled.
    """

    iteration: int
    stage: str
    """Name of the stage; a pool's with its name, like ``score-big``."""
    total: int
    done: int
    running: int
    waiting: int
    failed: int
    """Shards whose last attempt ended without a commit, and that no attempt is queued for."""
    reason: str | None
    """Reason why most of the waiting shards wait, in words; of one that does not pass by itself, before
    others."""
    queue_seconds: float | None
    """Longest time that a shard waited once its inputs were there, or has waited so far."""
    run_seconds: float | None
    """Seconds from the first start to the last end, or until now."""
    attempts: int
    """Attempts that were submitted or made."""
    resubmitted: int
    """Those after the first of a shard."""
    jobs: tuple[str, ...]
    """Ids of the arrays in the queue."""
    nodes: tuple[str, ...]
    """Nodes that it runs on."""
    helps: str | None = None
    """What a person can do against that reason, if it does not pass by itself."""


@dataclass(frozen=True)
class Lane:
    """Progress of a stage of an iteration, or of one pool's scores, and each shard's state."""

    progress: StageProgress
    shards: tuple[ShardState, ...]

    @property
    def key(self) -> tuple[int, str]:
        return self.progress.iteration, self.progress.stage


def lanes_of(tasks: Iterable[TaskState], now: float) -> tuple[Lane, ...]:
    """Make a lane for each stage (and pool) of each iteration, in the order of the plan."""
    groups = groupby(tasks, lambda state: (state.task.iteration, state.task.job_kind))
    return tuple(_lane(*key, list(group), now) for key, group in groups)


def _lane(iteration: int, job_kind: str, tasks: Sequence[TaskState], now: float) -> Lane:
    running = [t.element for t in tasks if t.is_running]
    waiting = [t.element for t in tasks if t.is_waiting]
    starts = [t.started for t in tasks if t.started is not None]
    end = now if running else max((t.record.ended for t in tasks if t.record), default=None)
    reason = _reason_of_most([e.reason for e in waiting if e])
    progress = StageProgress(
        iteration=iteration,
        stage=job_kind,
        total=len(tasks),
        done=sum(t.record is not None for t in tasks),
        running=len(running),
        waiting=len(waiting),
        failed=sum(t.has_failed for t in tasks),
        reason=reason.words if reason else None,
        helps=_release([e for e in waiting if e]) or _help_with(reason),
        queue_seconds=max((t.waited for t in tasks if t.waited is not None), default=None),
        run_seconds=max(0.0, end - min(starts)) if starts and end is not None else None,
        attempts=sum(t.attempts for t in tasks),
        resubmitted=sum(max(0, t.attempts - 1) for t in tasks),
        jobs=tuple(dict.fromkeys(e.array_id for e in (*running, *waiting) if e)),
        nodes=tuple(dict.fromkeys(e.node for e in running if e and e.node)),
    )
    return Lane(progress, tuple(t.shard_state for t in tasks))


def _release(waiting: Sequence["Element"]) -> str | None:
    """Return the command that lets elements start that are held, in words; None where none is."""
    if not waiting:
        return None
    from slurm.reasons import way_to_release

    return way_to_release(waiting)


def _reason_of_most(reasons: Sequence[str]) -> "WaitReason | None":
    """Return the commonest reason for waiting, of those that do not pass by themselves if there are any.

    Slurm says Priority of elements behind others of their own; then the others' reason counts.
    """
    if not reasons:
        return None
    from slurm.reasons import explain

    counts = Counter([reason for reason in reasons if reason.strip("()") != _BEHIND_OTHERS] or reasons)
    known = [explain(reason) for reason, _ in counts.most_common()]
    return next((reason for reason in known if reason.is_stuck), known[0])


def _help_with(reason: "WaitReason | None") -> str | None:
    if reason is None or not reason.is_stuck:
        return None
    from slurm.reasons import WaitEnds

    wait = "waiting does not help" if reason.ends is WaitEnds.NEVER else "it does not pass by itself"
    return f"{wait}: {reason.helps}"


# --- tasks of a run whose workers end with its driver ---


def local_task_states(
    tasks: Sequence[Task], records: Mapping[Task, Record], beats: Iterable[Beat], endings: Endings
) -> Iterator[TaskState]:
    """Yield the tasks' states, in the order given.

    Args:
        beats: of the workers that live.
        endings: how attempts at these tasks ended.
    """
    said = {(beat.task, beat.doing): beat for beat in beats}
    failures = Counter(ending.task for ending in endings.values() if ending.is_failure)
    ends = {ending.task: ending.started or ending.time for ending in endings.values() if ending.is_failure}
    for task in tasks:
        record, key = records.get(task), task_key(task)
        beat = None if record else said.get((key, Doing.BUSY))
        is_waiting = record is None and beat is None and (key, Doing.STARTING) in said
        has_failed = failures[key] > 0 and not (record or beat or is_waiting)
        yield TaskState(
            task,
            record,
            is_running=beat is not None,
            is_waiting=is_waiting,
            has_failed=has_failed,
            attempts=failures[key] + bool(record or beat or is_waiting),
            started=_begun(record, beat, ends.get(key) if has_failed else None),
        )


def at_work(beats: Iterable[Beat]) -> Iterator[Task]:
    """Yield the tasks that workers do or begin with."""
    doing = (Doing.BUSY, Doing.STARTING)
    yield from (parse_task(beat.task) for beat in beats if beat.task and beat.doing in doing)


def _begun(record: Record | None, beat: Beat | None, failed: float | None) -> float | None:
    if record:
        return record.started
    return beat.since if beat else failed
