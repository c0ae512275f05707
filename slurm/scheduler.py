"""The protocol between the driver and what runs its jobs. Knows nothing of PPO: keys are opaque strings."""

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
    """Where standard output and error go."""
    priority: int = 0
    """Where slots are few, lower numbers start first."""


@dataclass(frozen=True)
class JobStatus:
    """What is known of a job."""

    state: JobState
    exit_code: int | None = None
    """Once ended: the exit code, or minus the signal that ended it."""
    note: str = ""
    """Anything else the scheduler knows, in words (a time limit, say)."""


class Scheduler(Protocol):
    """Runs jobs."""

    def submit(self, jobs: Sequence[Job]) -> None:
        """Accept jobs; they start as slots are free, by priority, then in this order."""

    def query(self) -> Mapping[str, JobStatus]:
        """Every job since start-up or the last :meth:`forget`, by key."""

    def forget(self, key: str) -> None:
        """Drop an ended job."""

    def wait(self, seconds: float) -> None:
        """Start what fits; return when a job ends, or after ``seconds``."""

    def cancel(self) -> None:
        """Stop everything that runs and forget what is queued."""
