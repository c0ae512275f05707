"""Attempts at tasks, wherever they run: what the driver needs to know and to ask."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.orchestrate.reconcile import Launch, Observation
from pipeline.run.failures import Failure, GiveUp
from pipeline.run.tasks import Task

CommittedOf = Callable[[Collection[Task]], Collection[Task]]
"""Those of some tasks that are committed: asked at once, for the answer lists their folders."""


@dataclass(frozen=True)
class Ended:
    """An attempt that ended without a commit since the last look."""

    failure: Failure
    suspect: Task | None
    """The input that the attempt found to be at fault."""


class Jobs(Protocol):
    """Attempts at tasks."""

    @property
    def horizon(self) -> int:
        """Iterations that are launched before their inputs are there; 0: none."""

    def query(self) -> None:
        """Ask what runs. Comes before reading commits, so that an ended job's commit is seen."""

    def collect_ended(self, tasks: Sequence[Task], committed_of: CommittedOf) -> Sequence[Ended]:
        """Attempts that the last query showed as ended and that left no commit."""

    @property
    def live(self) -> Collection[Task]:
        """Tasks with an attempt that is queued or running."""

    @property
    def failures(self) -> Mapping[Task, Sequence[Failure]]:
        """Attempts that ended without a commit in this call, oldest first."""

    def note_retracted(self, failure: Failure) -> None:
        """A commit was taken back: counts as a failure."""

    def launch(self, launches: Sequence[Launch], seen: Observation) -> None:
        """Start attempts."""

    def update_dependencies(self, seen: Observation) -> None:
        """After launching: see to it that what waits, waits for the right thing."""

    def give_up(self, given_up: Sequence[GiveUp]) -> None:
        """The run cannot go on: nothing that waits needs to start."""
