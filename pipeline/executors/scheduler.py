"""Protocol between the driver and a scheduler of its jobs. Independent of PPO: keys are opaque strings."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class JobState(StrEnum):
    """State of a job as its scheduler reports it. Evidence about the attempt, never about its result."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True)
class Job:
    """One attempt at a task, as a job to run."""

    key: str
    pool: str
    """Name of the pool of slots or the partition it belongs to."""
    arguments: tuple[str, ...]
    """Command-line arguments of the entry point."""
    log: Path
    """File for standard output and error; with several ranks, the first one's (see :func:`rank_log`)."""
    priority: int = 0
    """Order of starting where slots are few: lower numbers first."""
    ranks: int = 1
    """Number of processes that do the job together. If several, each gets its place in RANK, LOCAL_RANK,
    WORLD_SIZE and RENDEZVOUS_FILE."""


def rank_log(log: Path, rank: int) -> Path:
    """Return the log of one rank: the job's own for the first, a file beside it for each of the others."""
    return log.with_suffix(f".rank-{rank}{log.suffix}") if rank else log


@dataclass(frozen=True)
class JobStatus:
    """State of a job, and how it ended."""

    state: JobState
    exit_code: int | None = None
    """Exit code of an ended job, or minus the signal that ended it; with several ranks, that of the one that
    failed first, if any did."""
    note: str = ""
    """Further facts that the scheduler knows, in words (a time limit, which rank failed)."""
    rank: int = 0
    """Rank that ``exit_code`` is of."""


def was_killed(exit_code: int | None) -> bool:
    """Whether a signal from outside ended the process. SIGABRT is not one: a process aborts by itself."""
    return exit_code is not None and exit_code < 0 and exit_code != -signal.SIGABRT


class Scheduler(Protocol):
    """Queue that runs jobs."""

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; they start as slots become free, by priority, then in this order."""

    def query(self) -> Mapping[str, JobStatus]:
        """Return the status of every job by its key, except those dropped by :meth:`forget`."""

    def forget(self, key: str) -> None:
        """Drop an ended job."""

    def wait(self, seconds: float) -> None:
        """Start the jobs that fit; return when a job or one of its ranks ends, or after ``seconds``."""

    def cancel(self) -> None:
        """Stop every running job and drop the queued ones."""
