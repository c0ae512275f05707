"""Array jobs for tasks that are due, as many as the queue takes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.config.job_kinds import DRIVERS
from pipeline.executors.slurm.arrays import in_order, position, stage_submissions
from pipeline.executors.slurm.dependencies import (
    ArrayElement,
    IsCommitted,
    committed_in,
    dependency_of,
    elements_of,
    ended_before,
)
from pipeline.executors.slurm.job_table import JobTable
from pipeline.executors.slurm.queue import is_live
from pipeline.executors.slurm.resources import Escalation, escalate
from pipeline.executors.slurm.submitter import Submitter
from pipeline.orchestrate.elements import free_elements
from pipeline.orchestrate.reconcile import Launch, Observation
from pipeline.orchestrate.situation import Order
from pipeline.run.failures import Failure
from pipeline.run.submissions import chunk_size_for, job_kind_of
from pipeline.run.tasks import Task
from slurm.limits import ClusterLimits
from slurm.sharedfiles import make_folder
from slurm.submission import QueueFull, Refused, cancel


@dataclass(frozen=True)
class Launcher:
    """Submits the arrays of one pass."""

    submitter: Submitter
    limits: ClusterLimits
    table: JobTable
    failures: Mapping[Task, Sequence[Failure]]
    note: Callable[[str], None]

    def launch(self, launches: Sequence[Launch], seen: Observation) -> Refused | None:
        """Submit an array for each job kind of each iteration, what others depend on first.

        Returns:
            What Slurm refused; what comes after it waits for the next pass.
        """
        free = self._free_elements()

        def launch_all() -> None:
            nonlocal free
            for tasks in in_order(launches):
                for some in self._apart(tasks):
                    free -= self._launch_somehow(some, seen, free)

        return self._as_far_as_possible(launch_all)

    def submit_workers(
        self, orders: Sequence[Order], now: float, known: Mapping[Task, int]
    ) -> Refused | None:
        """Submit arrays of workers, which no job waits for and which wait for none.

        Args:
            now: unix time.
            known: number of the newest claim on each task that has any.

        Returns:
            What Slurm refused; what comes after it waits for the next pass.
        """
        free = self._free_elements()

        def submit_all() -> None:
            nonlocal free
            for order in orders:
                for some in self._apart(order.tasks):
                    free -= self._submit_order(replace(order, tasks=some), now, known, free)

        return self._as_far_as_possible(submit_all)

    def _apart(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, ...]]:
        """Divide tasks so that one which Slurm could not start, and which waits, keeps no other waiting."""
        groups: dict[float, list[Task]] = {}
        for task in tasks:
            groups.setdefault(self._escalation([task]).delay, []).append(task)
        yield from map(tuple, groups.values())

    def _as_far_as_possible(self, act: Callable[[], None]) -> Refused | None:
        """Submit until Slurm refuses something. Returns that, unless it is only that the queue is full."""
        try:
            act()
        except QueueFull as error:
            self.note(f"the queue takes no more jobs now; the rest follows when some have ended ({error})")
        except Refused as error:
            return error
        return None

    def _launch_somehow(self, tasks: Sequence[Task], seen: Observation, free: int) -> int:
        """In a full queue, what can only start later makes room for what it waits for."""
        while True:
            try:
                return self._launch_stage(tasks, seen, free)
            except QueueFull:
                if not self._withdraw_last_after(tasks[0]):
                    raise

    def _launch_stage(self, tasks: Sequence[Task], seen: Observation, free: int) -> int:
        """Submit what fits and has its inputs in sight. Returns the number of elements."""
        run, is_committed, elements = self.submitter.run, committed_in(seen), self.table.elements
        waits = {task: self._elements_of(task, is_committed) for task in tasks}
        fitting = [task for task in tasks if waits[task] is not None][:free]
        if not fitting:
            return 0
        first, size = fitting[0], chunk_size_for(self.limits.max_array_size)
        number = self.table.ledger.next_number(first.iteration, first.job_kind)
        # NFS remembers for a while that a folder was not there: so it is there before anybody looks.
        make_folder(run.paths.task(first).folder, run.paths.root)
        for new in stage_submissions(run, self.table.seen.control.invocation, number, fitting, size):
            wanted = [(task, index, waits[task] or ()) for index, task in new.tasks()]
            ended = ended_before(run.plan, first, elements)
            dependency, arrays = dependency_of(wanted, self.submitter.config.dependency, ended)
            self.table.enter(self.submitter.submit(new, self._escalation(fitting), dependency, arrays))
        return len(fitting)

    def _submit_order(self, order: Order, now: float, known: Mapping[Task, int], free: int) -> int:
        """Submit the workers of an order that fit. Returns their number."""
        tasks = order.tasks[:free]
        if not tasks:
            return 0
        run, first = self.submitter.run, tasks[0]
        number = self.table.ledger.next_number(first.iteration, first.job_kind)
        make_folder(run.paths.task(first).folder, run.paths.root)
        size, invocation = chunk_size_for(self.limits.max_array_size), self.table.seen.control.invocation
        begin = 0.0 if order.begin is None else order.begin - now
        for new in stage_submissions(run, invocation, number, tasks, size, True, order.begin, known):
            self.table.enter(self.submitter.submit(new, self._escalation(tasks), "", (), begin))
        return len(tasks)

    def _elements_of(self, task: Task, is_committed: IsCommitted) -> tuple[ArrayElement, ...] | None:
        """Return the elements that ``task`` has to wait for; None if one cannot be named yet."""
        plan, elements = self.submitter.run.plan, self.table.elements
        before = plan.must_have_ended(task)
        if before in self.table.live and before not in elements:
            return None
        return elements_of(plan, task, is_committed, elements)

    def _escalation(self, tasks: Sequence[Task]) -> Escalation:
        everywhere = (failure for of_task in self.failures.values() for failure in of_task)
        return escalate((f for task in tasks for f in self.failures.get(task, ())), everywhere)

    def _withdraw_last_after(self, task: Task) -> bool:
        """Cancel the array that waits furthest behind ``task``. False if there is none."""
        lives = self.table.live.items()
        waiting = {live.submission.name: live.submission for t, live in lives if position(t) > position(task)}
        started = {live.submission.name for _, live in lives if not live.is_pending}
        behind = [s for name, s in waiting.items() if name not in started and s.state.job]
        if not behind:
            return False
        last = max(behind, key=lambda s: position(s.task(s.indices[0])))
        cancel([str(last.state.job)], only_pending=True)
        self.table.note(last, is_withdrawn=True)
        self.table.drop(last)
        self.note(f"the queue is full: job {last.state.job} makes room for what it waits for")
        return True

    def _free_elements(self) -> int:
        """Return how many elements of stages may still be submitted."""
        live = [e for elements in self.table.seen.queue.values() for e in elements if is_live(e)]
        of_drivers = sum(job_kind_of(e.name) in DRIVERS for e in live)
        of_stages = len(live) - of_drivers
        own_bound = self.submitter.config.max_submitted or self.limits.max_jobs // 2
        return free_elements(own_bound, self.limits.max_submit, of_stages, of_drivers)
