"""Protocol between the driver and attempts at tasks, wherever they run."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.orchestrate.reconcile import Launch, Observation
from pipeline.run.endings import Ending
from pipeline.run.failures import Failure
from pipeline.run.tasks import Task

CommittedOf = Callable[[Collection[Task]], Collection[Task]]
"""Function that returns the committed ones of some tasks; called once for all, as it lists folders."""


@dataclass(frozen=True)
class Ended:
    """An attempt that ended without a commit since the last look."""

    failure: Failure
    ending: Ending
    """The same as the store has it."""
    suspect: Task | None
    """The input that the attempt found to be at fault."""


class Jobs(Protocol):
    """Attempts at tasks, as processes of one machine or as jobs of a cluster."""

    def query(self) -> None:
        """Ask what runs. Precedes reading commits, so that an ended job's commit is seen."""

    def collect_ended(
        self, tasks: Sequence[Task], committed_of: CommittedOf, newest: Task | None = None
    ) -> Sequence[Ended]:
        """Return the attempts that the last query showed as ended and that left no commit.

        Args:
            newest: the newest committed update, whose attempt may still be live.
        """

    @property
    def live(self) -> Collection[Task]:
        """Tasks with an attempt that is queued or running."""

    @property
    def failures(self) -> Mapping[Task, Sequence[Failure]]:
        """Attempts that ended without a commit in this invocation, oldest first."""

    def note_retracted(self, failure: Failure, attempt: str) -> None:
        """Count a commit that was taken back as a failure of its task.

        Args:
            attempt: id of the attempt that had made it; empty where its record cannot be read.
        """

    def launch(self, launches: Sequence[Launch], seen: Observation) -> None:
        """Start attempts. Called in each pass that gives nothing up, also where nothing is to be launched."""
