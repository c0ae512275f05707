"""The protocol between the driver and what runs its jobs. Knows nothing of PPO: keys are opaque strings."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class JobState(StrEnum):
    """Where a job is, as its scheduler says. Evidence about the attempt, never about its result."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True)
class Job:
    """One attempt to run."""

    key: str
    pool: str
    """Name of the pool of slots or the partition it belongs to."""
    arguments: tuple[str, ...]
    """Command-line arguments of the entry point."""
    log: Path
    """Where standard output and error go; of several ranks the first one's, see :func:`rank_log`."""
    priority: int = 0
    """Where slots are few, lower numbers start first."""
    ranks: int = 1
    """Processes that do the job together, each told its place in RANK, LOCAL_RANK, WORLD_SIZE and
    RENDEZVOUS_FILE. One process is told nothing."""


def rank_log(log: Path, rank: int) -> Path:
    """The log of one rank: the job's own for the first, a file beside it for each of the others."""
    return log.with_suffix(f".rank-{rank}{log.suffix}") if rank else log


@dataclass(frozen=True)
class JobStatus:
    """What is known of a job."""

    state: JobState
    exit_code: int | None = None
    """Once ended: the exit code, or minus the signal that ended it; of several ranks that of the one that
    failed first, if any did."""
    note: str = ""
    """Anything else the scheduler knows, in words (a time limit, which rank failed)."""
    rank: int = 0
    """Whose exit code it is."""


def was_killed(exit_code: int | None) -> bool:
    """Whether somebody else ended the process. One that aborts does so itself, where it cannot go on."""
    return exit_code is not None and exit_code < 0 and exit_code != -signal.SIGABRT


class Scheduler(Protocol):
    """Runs jobs."""

    def submit(self, jobs: Sequence[Job]) -> None:
        """Accept jobs; they start as slots are free, by priority, then in this order."""

    def query(self) -> Mapping[str, JobStatus]:
        """Every job since start-up or the last :meth:`forget`, by key."""

    def forget(self, key: str) -> None:
        """Drop an ended job."""

    def wait(self, seconds: float) -> None:
        """Start what fits; return when a job or one of its ranks ends, or after ``seconds``."""

    def cancel(self) -> None:
        """Stop everything that runs and forget what is queued."""
