"""Failed attempts: why each ended without a commit, by its own failure file or as seen from outside."""

import contextlib
import errno
from dataclasses import dataclass
from enum import StrEnum

from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Task, parse_task
from slurm.sharedfiles import PASSING, from_json, names_in


class FailureKind(StrEnum):
    """Reason why an attempt ended without a commit."""

    ERROR = "error"
    """Error raised by the stage."""
    CONFIG = "config"
    """Settings, data or code of the user that cannot work; trying again cannot help."""
    NUMERICS = "numerics"
    """Loss, gradient or weight that was not finite; the same inputs would give it again."""
    KILLED = "killed"
    """Process that vanished: a signal, a cancelled job, or an unknown cause."""
    LOST = "lost"
    """Node that failed, or job that never arrived in the queue; not this task's fault."""
    UNSTARTED = "unstarted"
    """Job that ended before its first line ran, as its node could not open its output or start its container:
    not this task's fault. The next attempt comes later."""
    SETUP = "setup"
    """Line of setup that failed: not this task's fault, and its node's where other nodes pass it. The next
    attempt comes later."""
    PREEMPTED = "preempted"
    """Preemption: another job was given the attempt's place."""
    CANCELLED = "cancelled"
    """Cancellation with all jobs of the run, by ``cancel`` or before the run went back: no failed attempt."""
    MEMORY = "memory"
    """Use of more memory than the attempt had asked for, for which it was stopped."""
    DEVICE_MEMORY = "device_memory"
    """GPU memory that did not suffice for a batch. The next attempt computes half as much at once."""
    DEVICE = "device"
    """GPU or driver of a node that does not work. The next attempt is on another node, where there is one."""
    DISK = "disk"
    """Shared filesystem that was full, read-only or away; not this task's fault."""
    INPUTS = "inputs"
    """Input that was missing, corrupt or stale; not this task's fault."""
    TIMEOUT = "timeout"
    """Time limit, or a warning of it, that came before anything was saved."""
    PAUSED = "paused"
    """Stop on a warning, with a save of what was done; the next attempt goes on from there."""


FREE_KINDS = frozenset(
    {FailureKind.INPUTS, FailureKind.LOST, FailureKind.PREEMPTED, FailureKind.PAUSED, FailureKind.DISK}
    | {FailureKind.UNSTARTED, FailureKind.SETUP, FailureKind.CANCELLED}
)
"""Failures not counted against a task's budget of attempts: not its fault, or progress."""
NOT_BEGUN = frozenset({FailureKind.UNSTARTED, FailureKind.SETUP})
"""Failures of jobs whose task did not begin: the next attempt comes later, each time after twice as long."""
FOR_PEOPLE = frozenset({FailureKind.CONFIG, FailureKind.SETUP})
"""Failures for which people have to fix something before the run can go on."""
DISK_EXIT = 6
"""Exit code of a task that failed with kind DISK: known even where its failure file cannot be written."""
_OF_DISKS = PASSING | {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
"""Error numbers of a disk that may take files again later."""


def is_of_disk(error: BaseException) -> bool:
    """Whether an error is that of a shared filesystem that is full, read-only or away."""
    return isinstance(error, OSError) and error.errno in _OF_DISKS


@dataclass(frozen=True)
class Failure:
    """One attempt that ended without a commit."""

    task: Task
    attempt: int
    """Number of the attempt; 0: a commit was taken back."""
    kind: FailureKind
    message: str
    log: str = ""
    """Path of the attempt's log."""
    node: str = ""
    """Node that the attempt ran on; empty if unknown."""
    job: str = ""
    """Scheduler's id of the attempt, e.g. ``4711_3``."""


@dataclass(frozen=True)
class Said:
    """What an attempt said of its own failure: fields of a failure file."""

    kind: FailureKind
    message: str
    suspect: str | None = None
    """Key of the input that the attempt found to be at fault."""
    host: str = ""
    node: str = ""
    """Name of the node by Slurm, of several ranks that of the one that says it; empty elsewhere."""
    started: float | None = None
    ended: float | None = None
    """Unix times, by the clock of its node."""

    @property
    def suspected(self) -> Task | None:
        """The input at fault. Raises ValueError where that is no task."""
        return parse_task(self.suspect) if self.suspect else None


def last_attempt_number(paths: RunPaths, task: Task) -> int:
    """Return the highest attempt number that has a log, packed or not; 0 when the task was never tried."""
    from pipeline.run.packed import BadArchive, packed_below  # tasks import this module before they listen

    folder, log = paths.logs(task), f"{task.file_stem}.log"
    tried = {path.name for path in folder.glob("attempt-*") if log in names_in(path)}
    with contextlib.suppress(BadArchive):
        packed = packed_below(paths, task.iteration, folder)
        tried |= {name.removesuffix(f"/{log}") for name in packed if name.endswith(f"/{log}")}
    numbers = (name.removeprefix("attempt-") for name in tried)
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def read_said(paths: RunPaths, task: Task, attempt: int) -> Said | None:
    """Return what an attempt said of its failure; None where it left no failure file, or a spoilt one, as a
    disk that was full or a power cut leaves behind.

    Args:
        attempt: its number at the task.
    """
    from pipeline.config.conversion import converted  # tasks import this module before they listen to signals
    from pipeline.run.packed import read_file

    try:
        content = read_file(paths, task.iteration, paths.task(task).failure(attempt))
        said = converted(Said, from_json(content))
        said.suspected  # noqa: B018 - a file that names no task there is spoilt
    except (FileNotFoundError, ValueError):
        return None
    return said
