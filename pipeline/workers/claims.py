"""Claims: who works on a task now. A claim names an attempt; the commit record alone says that it is done.

``iterations/00003/rollout/shard-00002.claim-2.json`` is made by hard link, so of two workers one gets the
number; the other looks again. A claim whose worker is gone without a commit was a failed attempt at the task.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Task


@dataclass(frozen=True)
class Claim:
    """One attempt at a task, taken by a worker."""

    task: Task
    number: int
    """Number of the attempt at its task, from 1: names the folder of its log and its failure file."""
    attempt: str
    """Id of the attempt (:mod:`pipeline.run.attempts`)."""
    worker: str
    """Name of the worker (:mod:`pipeline.workers.beats`)."""
    time: float
    """Unix time at which it was taken."""


def take(paths: RunPaths, claim: Claim) -> bool:
    """Write a claim. False where its number is taken."""
    raise NotImplementedError


def claims_of(paths: RunPaths, tasks: Iterable[Task]) -> Mapping[Task, tuple[Claim, ...]]:
    """Return all claims of some tasks, by number; one listing for each folder."""
    raise NotImplementedError
