"""Instructions of passes to workers: which make place for what, and whether other people use such places too.
Decided by passes, which see all, and read by workers that have nothing to do.

``RUN/slurm/places.json`` is replaced by each pass that says something else. A worker that finds itself in it
leaves once there is no task for it; it decides nothing itself, so two of them never give way to each other.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline.config.conversion import converted, plain
from pipeline.run.durable import replace_durably
from pipeline.run.paths import RunPaths
from slurm.sharedfiles import read_newest, sealed, unsealed


@dataclass(frozen=True)
class Handover:
    """A worker that makes place."""

    worker: str
    """Its name (:mod:`pipeline.workers.beats`)."""
    whom: str
    """Job kind that its place is for; empty for a job that is not of the run's stages."""
    at: float = 0.0
    """Unix time before which it need not leave."""
    job: str = ""
    """Name of the job that its place is for, like ``4711_3``; empty if it is not in the queue yet."""


@dataclass(frozen=True)
class Instructions:
    """Decisions of the last pass that workers read."""

    handovers: tuple[Handover, ...] = ()
    is_contended: bool = False
    """Whether other people's jobs hold places on the nodes of the run."""
    measures: bool = False
    """Whether workers of rollouts that have nothing else to do measure policies."""

    def must_leave(self, worker: str, now: float) -> bool:
        """Whether a worker that has nothing to do makes place now."""
        return any(one.worker == worker and one.at <= now for one in self.handovers)


def publish_instructions(paths: RunPaths, new: Instructions) -> None:
    """Replace what is written, if it says something else."""
    if new != read_instructions(paths):
        replace_durably(file_of(paths), sealed(plain(new)))


def read_instructions(paths: RunPaths) -> Instructions:
    """Return the newest instructions; none where the file is missing or damaged."""
    try:
        return converted(Instructions, unsealed(read_newest(file_of(paths))))
    except (OSError, ValueError, TypeError):
        return Instructions()


def must_leave(paths: RunPaths, worker: str, now: float) -> bool:
    """Whether a worker that has nothing to do makes place now."""
    return read_instructions(paths).must_leave(worker, now)


def file_of(paths: RunPaths) -> Path:
    return paths.slurm / "places.json"
