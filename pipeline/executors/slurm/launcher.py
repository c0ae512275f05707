"""Arrays of workers, as many as the queue takes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from pipeline.config.job_kinds import DRIVERS
from pipeline.executors.slurm.arrays import stage_submissions
from pipeline.executors.slurm.fullness import note_full, shown_to_fit
from pipeline.executors.slurm.job_table import JobTable
from pipeline.executors.slurm.queue import is_live
from pipeline.executors.slurm.resources import Escalation, escalate
from pipeline.executors.slurm.submitter import Submitter
from pipeline.orchestrate.elements import free_elements, most_elements
from pipeline.orchestrate.situation import Order
from pipeline.run.failures import Failure
from pipeline.run.submissions import Submission, chunk_size_for, job_kind_of
from pipeline.run.tasks import Task
from slurm.limits import ClusterLimits
from slurm.query import Element
from slurm.sharedfiles import make_folder
from slurm.submission import QueueFull, Refused

_Group = TypeVar("_Group")


@dataclass(frozen=True)
class Launcher:
    """Submits the arrays of one pass."""

    submitter: Submitter
    limits: ClusterLimits
    table: JobTable
    failures: Mapping[Task, Sequence[Failure]]
    note: Callable[[str], None]
    entered: list[Submission] = field(default_factory=list)
    """Arrays that it has submitted."""

    def submit_workers(
        self, orders: Sequence[Order], now: float, known: Mapping[Task, int]
    ) -> Refused | None:
        """Submit arrays of workers.

        Args:
            now: unix time.
            known: number of the newest claim on each task that has any.

        Returns:
            What Slurm refused first; the others were submitted all the same.
        """
        groups = (replace(order, tasks=some) for order in orders for some in self._apart(order.tasks))
        return self._as_far_as_possible(
            groups,
            lambda order: self._in_pieces(
                order.tasks, lambda few: self._submit_order(replace(order, tasks=few), now, known)
            ),
        )

    def _apart(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, ...]]:
        """Divide tasks so that one which Slurm could not start, and which waits, keeps no other waiting."""
        groups: dict[float, list[Task]] = {}
        for task in tasks:
            groups.setdefault(self._escalation([task]).delay, []).append(task)
        yield from map(tuple, groups.values())

    def _as_far_as_possible(self, groups: Iterable[_Group], act: Callable[[_Group], None]) -> Refused | None:
        """Submit each group, until the queue is full. Returns what Slurm refused first for another reason:
        the partition of one stage may be closed, and that of others not."""
        first: Refused | None = None
        try:
            for group in groups:
                try:
                    act(group)
                except QueueFull:
                    raise
                except Refused as error:
                    first = first or error
        except QueueFull as error:
            self.note(f"the queue takes no more jobs now; the rest follows when some have ended ({error})")
            note_full(self.submitter.run.paths, self._elements_there(), str(error))
        return first

    def _in_pieces(self, tasks: Sequence[Task], submit: Callable[[tuple[Task, ...]], None]) -> None:
        """Submit tasks, at once or, where the queue does not take that, in halves: as many as it takes.

        Raises:
            QueueFull: it does not take all.
        """
        left, size = list(tasks), len(tasks)
        while left:
            try:
                submit(tuple(left[:size]))
            except QueueFull:
                if size == 1:
                    raise
                left, size = self._without_entered(left), (size + 1) // 2
            else:
                left = left[size:]

    def _without_entered(self, tasks: Sequence[Task]) -> list[Task]:
        entered = {task for submission in self.entered for _, task in submission.tasks()}
        return [task for task in tasks if task not in entered]

    def _enter(self, submission: Submission) -> None:
        self.table.enter(submission)
        self.entered.append(submission)

    def _submit_order(self, order: Order, now: float, known: Mapping[Task, int]) -> None:
        """Submit the workers of an order that fit."""
        tasks = order.tasks[: self._free_elements()]
        if not tasks:
            return
        run, first = self.submitter.run, tasks[0]
        number = self.table.ledger.next_number(first.iteration, first.job_kind)
        make_folder(run.paths.task(first).folder, run.paths.root)
        size, invocation = chunk_size_for(self.limits.max_array_size), self.table.seen.control.invocation
        begin = 0.0 if order.begin is None else order.begin - now
        for new in stage_submissions(run, invocation, number, tasks, size, order.begin, known):
            self._enter(self.submitter.submit(new, self._escalation(tasks), begin=begin))

    def _escalation(self, tasks: Sequence[Task]) -> Escalation:
        everywhere = (failure for of_task in self.failures.values() for failure in of_task)
        return escalate((f for task in tasks for f in self.failures.get(task, ())), everywhere)

    @property
    def num_submitted(self) -> int:
        """Return the number of elements that it has submitted."""
        return sum(len(submission.indices) for submission in self.entered)

    def most_elements(self) -> int:
        """Return how many elements of the run's stages the queue takes, as far as is known."""
        return most_elements(*self._bounds, self._drivers_there())

    @cached_property
    def _bounds(self) -> tuple[int, int | None]:
        config, now = self.submitter.config, self.table.seen.time
        own_bound = config.max_submitted or self.limits.max_jobs // 2
        shown = shown_to_fit(self.submitter.run.paths, now)
        return own_bound if shown is None else min(own_bound, shown), self.limits.max_submit

    def _free_elements(self) -> int:
        """Return how many elements of stages may still be submitted."""
        return free_elements(*self._bounds, self._elements_there(), self._drivers_there())

    def _elements_there(self) -> int:
        """Count the elements of the run's stages that wait or run."""
        return sum(job_kind_of(e.name) not in DRIVERS for e in self._live()) + self.num_submitted

    def _drivers_there(self) -> int:
        return sum(job_kind_of(e.name) in DRIVERS for e in self._live())

    def _live(self) -> Iterator[Element]:
        return (e for elements in self.table.seen.queue.values() for e in elements if is_live(e))
