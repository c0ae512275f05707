"""Arrays of workers, as many as the queue takes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from pipeline.config.job_kinds import DRIVERS
from pipeline.decide.elements import free_elements, most_elements
from pipeline.decide.escalating import Escalation, escalate
from pipeline.decide.situation import WorkerRequest
from pipeline.executors.slurm.arrays import Submitter, stage_submissions
from pipeline.executors.slurm.fullness import note_full, shown_to_fit
from pipeline.executors.slurm.job_table import JobTable
from pipeline.executors.slurm.queue import is_live
from pipeline.run import journal
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import Submission, chunk_size_for, job_kind_of
from pipeline.run.tasks import Task, parse_task
from slurm.limits import ClusterLimits
from slurm.query import Element
from slurm.sharedfiles import make_folder
from slurm.submission import QueueFull, Refused

_BROKEN_SECONDS = 3600.0
"""Seconds for which jobs of later iterations keep away from a node whose GPU failed. A broken one is mostly
free, so that each iteration would begin there; one that was only busy is used again."""


def broken_since(paths: RunPaths, moment: float) -> Iterator[Failure]:
    """Yield the failures by faults of GPUs from a moment on (unix time), of whatever iteration."""
    for row in journal.read_since(paths.events, moment):
        is_such = (row.get("event"), row.get("kind")) == ("failed", FailureKind.DEVICE)
        if is_such and row.get("time", 0.0) >= moment:
            task, node = parse_task(row["task"]), row.get("node", "")
            yield Failure(task, row["attempt"], FailureKind.DEVICE, row["message"], node=node)


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
        self, requests: Sequence[WorkerRequest], now: float, known: Mapping[Task, int]
    ) -> Refused | None:
        """Submit arrays of workers.

        Args:
            now: unix time.
            known: number of the newest claim on each task that has any.

        Returns:
            What Slurm refused first; the others were submitted all the same.
        """
        first: Refused | None = None
        groups = (replace(request, tasks=some) for request in requests for some in self._apart(request.tasks))
        try:
            for group in groups:
                try:
                    self._submit_in_pieces(group, now, known)
                except QueueFull:
                    raise
                except Refused as error:  # the partition of one stage may be closed, and that of others not
                    first = first or error
        except QueueFull as error:
            self.note(f"the queue accepts no more jobs now; the rest follows when some have ended ({error})")
            note_full(self.submitter.run.paths, self._elements_there(), str(error))
        return first

    def _apart(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, ...]]:
        """Divide tasks so that one which Slurm could not start, and which waits, keeps no other waiting."""
        groups: dict[float, list[Task]] = {}
        for task in tasks:
            groups.setdefault(self._escalation([task]).delay, []).append(task)
        yield from map(tuple, groups.values())

    def _submit_in_pieces(self, request: WorkerRequest, now: float, known: Mapping[Task, int]) -> None:
        """Submit a request, at once or, where the queue does not take that, in halves: as many as it takes.

        Raises:
            QueueFull: it does not take all.
        """
        left, size = request.tasks, len(request.tasks)
        while left:
            try:
                self._submit(replace(request, tasks=left[:size]), now, known)
            except QueueFull:
                if size == 1:
                    raise
                entered = {task for submission in self.entered for _, task in submission.tasks()}
                left, size = tuple(task for task in left if task not in entered), (size + 1) // 2
            else:
                left = left[size:]

    def _submit(self, request: WorkerRequest, now: float, known: Mapping[Task, int]) -> None:
        """Submit the workers of a request that fit."""
        tasks = request.tasks[: free_elements(*self._bounds, self._elements_there(), self._drivers_there())]
        if not tasks:
            return
        run, first = self.submitter.run, tasks[0]
        number = self.table.ledger.next_number(first.iteration, first.job_kind)
        make_folder(run.paths.task(first).folder, run.paths.root)
        size, invocation = chunk_size_for(self.limits.max_array_size), self.table.seen.control.invocation
        begin = 0.0 if request.begin is None else request.begin - now
        for new in stage_submissions(run, invocation, number, tasks, size, request.begin, known):
            submission = self.submitter.submit(new, self._escalation(tasks), begin=begin)
            self.table.submissions.append(submission)
            self.entered.append(submission)

    def _escalation(self, tasks: Sequence[Task]) -> Escalation:
        at_hand = (failure for of_task in self.failures.values() for failure in of_task)
        everywhere = (*at_hand, *self._broken_lately)
        return escalate((f for task in tasks for f in self.failures.get(task, ())), everywhere)

    @cached_property
    def _broken_lately(self) -> tuple[Failure, ...]:
        seen = self.table.seen
        since = max(seen.control.begun, seen.time - _BROKEN_SECONDS)
        return tuple(broken_since(self.submitter.run.paths, since))

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

    def _elements_there(self) -> int:
        """Count the elements of the run's stages that wait or run."""
        return sum(job_kind_of(e.name) not in DRIVERS for e in self._live()) + self.num_submitted

    def _drivers_there(self) -> int:
        return sum(job_kind_of(e.name) in DRIVERS for e in self._live())

    def _live(self) -> Iterator[Element]:
        return (e for elements in self.table.seen.queue.values() for e in elements if is_live(e))
