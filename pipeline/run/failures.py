"""Failed attempts: why each ended without a commit, and what the attempt itself left to say."""

import json
from dataclasses import dataclass, replace
from enum import StrEnum

from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Task, parse_task
from slurm.sharedfiles import names_in, read_shared


class FailureKind(StrEnum):
    """Why an attempt ended without a commit."""

    ERROR = "error"
    """The stage raised an error."""
    CONFIG = "config"
    """What the user gave cannot work; trying again cannot help."""
    NUMERICS = "numerics"
    """A loss, gradient or weight was not finite; the same inputs would give it again."""
    KILLED = "killed"
    """The process vanished: a signal, a cancelled job, or nobody knows."""
    LOST = "lost"
    """The node failed, or the job never arrived in the queue; not this task's fault."""
    PREEMPTED = "preempted"
    """Another job was given its place."""
    MEMORY = "memory"
    """It was stopped for using more memory than it had asked for."""
    DISK = "disk"
    """The shared filesystem was full, read-only or away; not this task's fault."""
    INPUTS = "inputs"
    """An input was missing, corrupt or stale; not this task's fault."""
    TIMEOUT = "timeout"
    """The time limit came, or a warning of it, before anything was saved."""
    PAUSED = "paused"
    """It stopped on a warning and saved what it had; the next attempt goes on from there."""


DISK_EXIT = 6
"""Exit code of a task whose failure is of kind DISK: known, although it could not write why, either."""


@dataclass(frozen=True)
class Failure:
    """One attempt that ended without a commit."""

    task: Task
    attempt: int
    """0: a commit was taken back."""
    kind: FailureKind
    message: str
    log: str = ""
    """Path of its log."""
    node: str = ""
    """Where it ran, if that is known."""
    job: str = ""
    """Its scheduler's id, e.g. ``4711_3``."""


@dataclass(frozen=True)
class GiveUp:
    """``task`` cannot be done; the run stops."""

    task: Task
    failure: Failure


def last_attempt_number(paths: RunPaths, task: Task) -> int:
    """The highest attempt number that has a log; 0 when the task was never tried."""
    numbers = [0]
    for folder in paths.logs(task).glob("attempt-*"):
        if f"{task.file_stem}.log" in names_in(folder):
            numbers.append(int(folder.name.removeprefix("attempt-")))
    return max(numbers)


def explain_failure(paths: RunPaths, unsaid: Failure) -> tuple[Failure, Task | None]:
    """Why an attempt ended without a commit, and which input it suspects.

    Args:
        unsaid: the failure as it looks from outside, if the attempt itself left no word.
    """
    path = paths.task(unsaid.task).failure(unsaid.attempt)
    try:
        said = json.loads(read_shared(path))
    except FileNotFoundError:
        return unsaid, None
    suspect = parse_task(said["suspect"]) if said["suspect"] else None
    return replace(unsaid, kind=FailureKind(said["kind"]), message=said["message"]), suspect
