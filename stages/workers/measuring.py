"""What a worker of rollouts knows of the policies that it may measure while it has nothing else to do."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.decide import choosing, estimates
from pipeline.decide.choosing import Measuring, View
from pipeline.decide.measuring import (
    MEASURED,
    MEASURES,
    Helper,
    is_manned,
    measures_policies,
    others_of,
    stays_for_last,
)
from pipeline.run.directory import Run
from pipeline.run.records import Frontier
from pipeline.run.tasks import Task
from pipeline.workers.beats import Beat, LiveWorkers
from pipeline.workers.handover import read_instructions
from stages.workers.waiting import Waiting


@dataclass
class Besides:
    """The evaluations that one worker may do besides its own tasks."""

    run: Run
    job_kind: str
    name: str
    """The worker's."""
    waiting: Waiting
    crew: LiveWorkers
    has_measured: bool = False
    """Whether the last task that it took was an evaluation."""
    is_able: bool = field(init=False)
    """Whether it may do any, by the configuration and by its own time limit."""

    def __post_init__(self) -> None:
        self.is_able = self.job_kind == MEASURES and measures_policies(self.run.config)

    def tasks(self, frontier: Frontier) -> tuple[Task, ...]:
        """Return the evaluations that it may do or wait for, if the last pass has said that it may; none for
        one that makes place."""
        told = read_instructions(self.run.paths) if self.is_able else None
        if told is None or not told.measures or told.must_leave(self.name, time.time()):
            return ()
        return choosing.to_measure(self.run.plan, frontier)

    def known(
        self, view: View, own: Sequence[Task], tasks: Sequence[Task], live: Mapping[str, Beat]
    ) -> Measuring | None:
        """Return what its choice depends on; None where a worker lives that is there for evaluations alone.

        Args:
            own: tasks of its own kind that it may do or wait for.
            tasks: the evaluations.
            live: newest beats of the workers that live, by name.
        """
        if not tasks or is_manned(live.values()):
            return None
        others, undone = others_of(self.name, live.values()), [t for t in own if t not in view.committed]
        awaited = next((task for task in undone if choosing.missing(view, task)), None)
        due = [t for t in tasks if t not in view.committed and not choosing.missing(view, t)]
        own_state = Helper(self.name, self.waiting.pulse.beat.measured, self.has_measured)
        ready = ((task, self.waiting.ready_at(task)) for task in due)
        return Measuring(
            seconds=estimates.task_seconds(self.crew.beats.values(), MEASURED),
            own_seconds=view.median_seconds,
            input_at=self.waiting.input_at(awaited) if awaited and due else None,
            others=len(others),
            is_last=stays_for_last(own_state, others),
            ready_at={task: at for task, at in ready if at is not None},
        )


def release_scorer() -> None:
    """Give back the reward model with which an evaluation was scored: rollouts have the memory without it."""
    if engines := sys.modules.get("stages.engines"):
        engines.release("scorer")
