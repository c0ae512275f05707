"""The attempts at a run's tasks as Slurm's array jobs.

Nothing is remembered between passes but what is on disk (:mod:`pipeline.run.submissions`) and in Slurm's
queue.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.config.job_kinds import DRIVERS, GUARD
from pipeline.config.scheduler import SlurmConfig
from pipeline.executors.slurm.arrays import driver_submission, in_order, position, stage_submissions
from pipeline.executors.slurm.dependencies import (
    ArrayElement,
    DependencyUpdate,
    Waiting,
    Watch,
    committed_in,
    dependency_of,
    elements_of,
    rewire,
    watch_expression,
    watches,
)
from pipeline.executors.slurm.exit_reasons import as_seen, evidence_of, verdict_of
from pipeline.executors.slurm.queue import ElementsByName, cancel_jobs, is_live, is_pending, read_run_queue
from pipeline.executors.slurm.resources import Escalation, escalate
from pipeline.executors.slurm.submitter import Submitter
from pipeline.orchestrate.jobs import CommittedOf, Ended
from pipeline.orchestrate.reconcile import Launch, Observation
from pipeline.run import journal
from pipeline.run.control import Control, read_control, write_control
from pipeline.run.directory import Run
from pipeline.run.failures import Failure, FailureKind, GiveUp, explain_failure
from pipeline.run.submissions import Ending, Ledger, Submission, age, chunk_size_for, purpose_of
from pipeline.run.tasks import Task, parse_task, task_key
from slurm.commands import SlurmError
from slurm.limits import ClusterLimits
from slurm.query import Element, find_by_name
from slurm.states import SlurmState
from slurm.submission import QueueFull, Refused, array_expression, cancel, update_dependency

_ARRIVAL_SECONDS = 30.0
"""A submission without a job id is looked for this long, before it is taken never to have arrived."""
_KEPT_FOR_DRIVERS = 4
GUARDS = 2
_GUARDS_KEPT = 4


@dataclass(frozen=True)
class Live:
    """An array element that waits or runs."""

    submission: Submission
    carrier: ArrayElement
    element: Element | None
    """None right after it was submitted."""

    @property
    def is_pending(self) -> bool:
        return self.element is None or is_pending(self.element)


@dataclass
class SlurmJobs:
    """The jobs of a run, as one pass sees them."""

    run: Run
    config: SlurmConfig
    limits: ClusterLimits
    submitter: Submitter
    note: Callable[[str], None]
    control: Control = field(default_factory=Control)
    failures: dict[Task, list[Failure]] = field(default_factory=dict)
    _queue: ElementsByName = field(default_factory=dict)
    _submissions: list[Submission] = field(default_factory=list)
    _live: dict[Task, Live] = field(default_factory=dict)
    _driver_jobs: list[str] = field(default_factory=list)
    """Submitted in this pass."""
    _is_fresh: bool = False
    refusal: Refused | None = None
    """What Slurm did not take in this pass; the rest of the pass was done all the same."""

    @property
    def horizon(self) -> int:
        return self.config.horizon

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.run.paths)

    @property
    def live(self) -> Collection[Task]:
        return self._live.keys()

    # --- what is there -------------------------------------------------------------------------------

    def query(self) -> None:
        if not self._is_fresh:
            self.control = read_control(self.run.paths)
            self._queue = read_run_queue(self.run)
        self._is_fresh = False

    def ensure_watchdogs(self) -> None:
        """See to it that guards wait, before anything else is tried: a pass that fails must not be the last.

        Two of them, one behind the other, so that one that is lost does not end the run either.
        """
        self.query()
        self._is_fresh = True  # the pass that follows need not ask again
        self._submissions = self._with_job_ids(self.ledger.load({0}))
        try:
            for waiting in range(self._count_pending(GUARD), GUARDS):
                begin = f"now+{60 * self.config.check_minutes * (waiting + 1)}"
                self._submit_driver(0, GUARD, "", (), begin)
        except QueueFull as error:
            self.note(f"the queue takes no guard now ({error})")
        self._forget_old_guards()

    def collect_ended(self, tasks: Sequence[Task], committed_of: CommittedOf) -> list[Ended]:
        """Match what was submitted with what Slurm shows, and explain what ended without a commit."""
        self._submissions = self._with_job_ids(self.ledger.load({task.iteration for task in tasks} | {0}))
        self._live = dict(self._find_live())
        gone = list(self._find_gone(committed_of))
        found = self._explain(gone) if gone else []
        self.failures = self._failures()
        return found

    def _with_job_ids(self, submissions: Sequence[Submission]) -> list[Submission]:
        """Find the jobs of submissions whose answer was lost: by name, in the queue first."""
        nameless = {s.name for s in submissions if s.state.job is None and not s.state.ended}
        known = {name: self._queue[name][0].array_id for name in nameless if name in self._queue}
        if missing := nameless - known.keys():
            known |= find_by_name(missing)
        return [
            self.ledger.note(s, replace(s.state, job=known[s.name])) if s.name in known else s
            for s in submissions
        ]

    def _find_live(self) -> Iterator[tuple[Task, Live]]:
        for submission in self._submissions:
            elements = {e.index: e for e in self._queue.get(submission.name, ()) if is_live(e)}
            for index, task in submission.tasks():
                if element := elements.get(index):
                    yield task, Live(submission, ArrayElement(element.array_id, index), element)
                elif self._is_expected(submission) and not submission.state.ended:
                    yield task, Live(submission, ArrayElement("", index), None)

    def _find_gone(self, committed_of: CommittedOf) -> Iterator[tuple[Submission, int]]:
        """Elements that have ended without a commit and are not accounted for yet."""
        unsettled = list(self._find_unsettled())
        committed = committed_of([submission.task(index) for submission, index in unsettled])
        return (one for one in unsettled if one[0].task(one[1]) not in committed)

    def _find_unsettled(self) -> Iterator[tuple[Submission, int]]:
        """Elements that are not in the queue and are not accounted for."""
        for submission in self._submissions:
            if submission.state.is_withdrawn or self._is_expected(submission):
                continue
            here = {e.index for e in self._queue.get(submission.name, ()) if is_live(e)}
            for index, _ in submission.tasks():
                if index not in here and str(index) not in submission.state.ended:
                    yield submission, index

    def _is_expected(self, submission: Submission) -> bool:
        """Whether it may yet show in the queue: its driver died between submitting and noting that."""
        return submission.state.job is None and age(submission) < _ARRIVAL_SECONDS

    @property
    def is_unsure(self) -> bool:
        """Whether a job may have been submitted that the queue does not show yet."""
        return any(not live.carrier.array for live in self._live.values())

    def _explain(self, gone: list[tuple[Submission, int]]) -> list[Ended]:
        """Note in the ledger how elements ended."""
        seen = {(e.array_id, e.index): e for elements in self._queue.values() for e in elements}
        evidence = evidence_of(gone, seen)
        retracted = dict(self.control.retracted)
        found: list[Ended] = []
        endings: dict[str, dict[str, Ending]] = {}
        for submission, index in gone:
            element = evidence.get((submission.state.job or "", index))
            outside = as_seen(self.run.paths, submission, index, element)
            said, suspect = explain_failure(self.run.paths, outside)
            failure = verdict_of(outside, said, element.state if element else None)
            if task_key(failure.task) in retracted and (not element or element.state is SlurmState.COMPLETED):
                failure = replace(failure, kind=FailureKind.INPUTS, message="its commit was taken back")
            found.append(Ended(failure, suspect))
            ending = Ending(failure.kind, failure.message, failure.node)
            endings.setdefault(submission.name, {})[str(index)] = ending
        self._submissions = [self._with_endings(s, endings.get(s.name, {})) for s in self._submissions]
        return found

    def _with_endings(self, submission: Submission, endings: Mapping[str, Ending]) -> Submission:
        if not endings:
            return submission
        ended = {**submission.state.ended, **endings}
        return self.ledger.note(submission, replace(submission.state, ended=ended))

    def _failures(self) -> dict[Task, list[Failure]]:
        """Of this call alone: every call has a budget of its own."""
        found: dict[Task, list[Failure]] = {}
        for submission in self._submissions:
            if submission.call == self.control.call:
                for failure in submission.failures(self.run.paths):
                    found.setdefault(failure.task, []).append(failure)
        for key, reason in self.control.retracted:
            task = parse_task(key)
            found.setdefault(task, []).append(Failure(task, 0, FailureKind.INPUTS, reason))
        return found

    def note_retracted(self, failure: Failure) -> None:
        entry = (task_key(failure.task), failure.message)
        self.control = replace(self.control, retracted=(*self.control.retracted, entry))
        write_control(self.run.paths, self.control)
        self.failures.setdefault(failure.task, []).append(failure)

    # --- what is to be there -------------------------------------------------------------------------

    def launch(self, launches: Sequence[Launch], seen: Observation) -> None:
        """An array for each purpose of each iteration, in the order in which they depend on each other."""
        room, self.refusal = self._room(), None
        try:
            for tasks in in_order(launches):
                room -= self._launch_somehow(tasks, seen, room)
        except QueueFull as error:
            self.note(f"the queue takes no more jobs now; the rest follows when some have ended ({error})")
        except Refused as error:
            self.refusal = error

    def _launch_somehow(self, tasks: Sequence[Task], seen: Observation, room: int) -> int:
        """In a full queue, what can only start later makes room for what it waits for."""
        while True:
            try:
                return self._launch_stage(tasks, seen, room)
            except QueueFull:
                if not self._withdraw_last_after(tasks[0]):
                    raise

    def _withdraw_last_after(self, task: Task) -> bool:
        """Cancel the array that waits furthest behind ``task``. False if there is none."""
        waiting: dict[str, Submission] = {}
        for other, live in self._live.items():
            if position(other) > position(task):
                waiting[live.submission.name] = live.submission
        started = {live.submission.name for live in self._live.values() if not live.is_pending}
        behind = [s for name, s in waiting.items() if name not in started and s.state.job]
        if not behind:
            return False
        last = max(behind, key=lambda s: position(s.task(s.indices[0])))
        cancel([str(last.state.job)], only_pending=True)
        self._replace(self.ledger.note(last, replace(last.state, is_withdrawn=True)))
        self._live = {t: live for t, live in self._live.items() if live.submission.name != last.name}
        self.note(f"the queue is full: job {last.state.job} makes room for what it waits for")
        return True

    def _room(self) -> int:
        """Elements of stages that may still be submitted; a few jobs are kept for drivers."""
        live = [e for elements in self._queue.values() for e in elements if is_live(e)]
        of_drivers = sum(purpose_of(e.name) in DRIVERS for e in live)
        of_stages = len(live) - of_drivers
        bounds = [self.config.max_submitted or self.limits.max_jobs // 2]
        if self.limits.max_submit is not None:
            bounds.append(self.limits.max_submit - max(of_drivers, _KEPT_FOR_DRIVERS))
        return max(0, min(bounds) - of_stages)

    def _launch_stage(self, tasks: Sequence[Task], seen: Observation, room: int) -> int:
        """Submit what fits and has its inputs in sight. Returns the number of elements."""
        is_committed = committed_in(seen)
        carriers = self._carriers()
        waits = {task: elements_of(self.run.plan, task, is_committed, carriers) for task in tasks}
        fitting = [task for task in tasks if waits[task] is not None][:room]
        if not fitting:
            return 0
        first, size = fitting[0], chunk_size_for(self.limits.max_array_size)
        number = self.ledger.next_number(first.iteration, first.purpose)
        # NFS remembers for a while that a folder was not there: so it is there before anybody looks.
        self.run.paths.task(first).folder.mkdir(parents=True, exist_ok=True)
        escalation = self._lessons(fitting)
        for new in stage_submissions(self.run, self.control.call, number, fitting, size):
            wanted = [(task, index, waits[task] or ()) for index, task in new.tasks()]
            dependency, arrays = dependency_of(wanted, self.config.dependency)
            submission = self._submit(new, escalation, dependency, arrays)
            assert submission.state.job is not None
            for index, task in submission.tasks():
                self._live[task] = Live(submission, ArrayElement(submission.state.job, index), None)
        return len(fitting)

    def _carriers(self) -> dict[Task, ArrayElement]:
        return {task: live.carrier for task, live in self._live.items() if live.carrier.array}

    def _lessons(self, tasks: Sequence[Task]) -> Escalation:
        everywhere = (failure for failures in self.failures.values() for failure in failures)
        return escalate((f for task in tasks for f in self.failures.get(task, ())), everywhere)

    def _submit(
        self,
        new: Submission,
        escalation: Escalation,
        dependency: str,
        arrays: tuple[str, ...],
        begin: str = "",
    ) -> Submission:
        submission = self.submitter.submit(new, escalation, dependency, arrays, begin)
        self._submissions.append(submission)
        return submission

    def update_dependencies(self, seen: Observation) -> None:
        """Have what waits for failed jobs wait for what replaces them; ensure driver jobs."""
        carriers = self._carriers()
        waiting = list(self._waiting())
        for change in rewire(self.run.plan, waiting, committed_in(seen), carriers, self.config.dependency):
            self._carry_out(change)
        try:
            for watch in watches((task, live.carrier.array) for task, live in self._live.items()):
                self._ensure_driver(watch)
        except QueueFull as error:
            self.note(f"the queue takes no driver job now; the guard does its work ({error})")

    def _waiting(self) -> Iterator[Waiting]:
        for task, live in self._live.items():
            if live.element is not None and live.is_pending:
                told = live.submission.state.waits_for
                yield Waiting(task, live.carrier, live.element.reason, told)

    def _carry_out(self, change: DependencyUpdate) -> None:
        self.submitter.beat()
        array = change.elements[0].array
        elements = f"{array}_[{array_expression(sorted(e.index for e in change.elements), None)}]"
        try:
            update_dependency(elements, change.dependency)
        except SlurmError as error:  # it has started or ended since it was seen; the next pass sees more
            self.note(f"{elements} could not be told to wait for {change.waits_for}: {error}")
            return
        submission = next(s for s in self._submissions if s.state.job == array)
        told = tuple(dict.fromkeys((*submission.state.waits_for, *change.waits_for)))
        self._replace(self.ledger.note(submission, replace(submission.state, waits_for=told)))
        journal.event(self.run.paths.events, "rewired", elements=elements, waits_for=change.dependency)
        self.note(
            f"{submission.purpose} of iteration {submission.iteration} now waits for job "
            f"{', '.join(change.waits_for) or 'nothing'}"
        )

    def _replace(self, submission: Submission) -> None:
        self._submissions = [submission if s.name == submission.name else s for s in self._submissions]

    def _ensure_driver(self, watch: Watch) -> None:
        """One driver job waits for just these arrays."""
        expression = watch_expression(watch.last, watch.earlier)
        existing = self._pending_driver(watch.iteration, watch.purpose)
        if existing is None:
            self._submit_driver(watch.iteration, watch.purpose, expression, watch.arrays)
        elif set(existing.state.waits_for) != set(watch.arrays):
            self._rewatch(existing, expression, watch.arrays)

    def _rewatch(self, driver: Submission, expression: str, watched: tuple[str, ...]) -> None:
        assert driver.state.job is not None
        try:
            update_dependency(driver.state.job, expression)
        except SlurmError:  # it has started since it was seen: another one has to watch
            self._submit_driver(driver.iteration, driver.purpose, expression, watched)
            return
        self._replace(self.ledger.note(driver, replace(driver.state, waits_for=watched)))

    def _forget_old_guards(self) -> None:
        """There is one every few minutes: what is kept of them must not grow with the run."""
        guards = [s for s in self._submissions if s.purpose == GUARD]
        for guard in guards[:-_GUARDS_KEPT]:
            self.ledger.forget(guard)

    def _count_pending(self, purpose: str) -> int:
        jobs = (elements for name, elements in self._queue.items() if purpose_of(name) == purpose)
        return sum(any(map(is_pending, elements)) for elements in jobs)

    @property
    def is_watched(self) -> bool:
        """Whether a driver job waits that will look after the run."""
        return bool(self._driver_jobs) or any(map(self._count_pending, DRIVERS))

    def _pending_driver(self, iteration: int, purpose: str) -> Submission | None:
        for submission in self._submissions:
            if (submission.iteration, submission.purpose) == (iteration, purpose):
                elements = self._queue.get(submission.name, ())
                if any(map(is_pending, elements)):
                    return submission
        return None

    def _submit_driver(
        self, iteration: int, purpose: str, dependency: str, arrays: tuple[str, ...], begin: str = ""
    ) -> None:
        number = self.ledger.next_number(iteration, purpose)
        new = driver_submission(self.run, self.control.call, iteration, purpose, number)
        submission = self._submit(new, Escalation(), dependency, arrays, begin)
        self._driver_jobs.append(submission.state.job or "")

    def give_up(self, given_up: Sequence[GiveUp]) -> None:
        """Nothing that waits needs to start; what runs may end, and its commits count."""
        self.withdraw()

    def withdraw(self) -> int:
        """Cancel every job of the run that waits. Returns how many arrays."""
        if self._driver_jobs:
            cancel(self._driver_jobs, only_pending=True)
        return cancel_jobs(self._queue.values(), only_pending=True)
