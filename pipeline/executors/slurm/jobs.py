"""The attempts at a run's tasks as Slurm's array jobs.

Nothing is remembered between passes but what is on disk (:mod:`pipeline.run.submissions`) and in Slurm's
queue: a pass takes one snapshot, :class:`JobTable` matches the two, :class:`Launcher` submits arrays,
:class:`Watchdogs` keeps driver jobs in the queue.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from pipeline.config.job_kinds import DRIVERS
from pipeline.executors.slurm.by_hand import Paused, look_for_act
from pipeline.executors.slurm.dependencies import DependencyUpdate, committed_in, rewire
from pipeline.executors.slurm.exit_reasons import Accounts, Gone, explain
from pipeline.executors.slurm.job_table import JobTable, Snapshot, read_table, take_snapshot
from pipeline.executors.slurm.launcher import Launcher
from pipeline.executors.slurm.queue import arrays_of, is_live, is_pending
from pipeline.executors.slurm.submitter import Submitter
from pipeline.executors.slurm.watchdogs import Watchdogs
from pipeline.orchestrate.jobs import CommittedOf, Ended
from pipeline.orchestrate.reconcile import Launch, Observation
from pipeline.run import journal
from pipeline.run.control import read_control, write_control
from pipeline.run.directory import Run
from pipeline.run.endings import mend_endings, retraction
from pipeline.run.failures import Failure
from pipeline.run.submissions import Submission, is_driver_job, is_job_of
from pipeline.run.tasks import Task
from pipeline.workers.looking import Look, look
from slurm.commands import SlurmError, SlurmTimeout
from slurm.limits import ClusterLimits
from slurm.query import Element
from slurm.signals import Errands
from slurm.submission import Refused, array_expression, update_dependency

SECOND_PATIENCE = 5.0
"""Seconds that squeue may take while the lease is held."""


@dataclass
class SlurmJobs:
    """The jobs of a run, in one pass."""

    submitter: Submitter
    limits: ClusterLimits
    note: Callable[[str], None]
    errands: Errands
    """What runs beside the pass."""
    accounts: Accounts = field(default_factory=Accounts)
    """What accounting has said before the pass."""
    watchdogs: Watchdogs = field(init=False)
    table: JobTable = field(init=False)
    """Jobs of this pass, from one snapshot of the queue."""
    failures: dict[Task, list[Failure]] = field(default_factory=dict)
    needs_watchdogs: bool = False
    """Whether a pass begins with watchdogs: whatever goes wrong in it, there will be another."""
    refusal: Refused | None = None
    """The job that Slurm refused in this pass; the rest of the pass was done all the same."""
    first_look: Look | None = None
    """Look at the queue from before the lease was taken; None: the pass looks itself."""
    is_alone: bool = False
    """Whether nobody has held the lease since that was asked for."""
    second_look: Look | None = None
    """Look by which it was confirmed that elements are gone."""

    def __post_init__(self) -> None:
        self.watchdogs = Watchdogs(self.submitter, self.note)
        self.table = JobTable(self.submitter.ledger)

    @property
    def run(self) -> Run:
        return self.submitter.run

    @property
    def elements(self) -> list[Element]:
        """Elements of the run's jobs, as this pass sees the queue."""
        return [element for of_name in self.table.seen.queue.values() for element in of_name]

    @property
    def lookahead(self) -> int:
        return self.submitter.config.lookahead

    @property
    def live(self) -> Collection[Task]:
        return self.table.live.keys()

    @property
    def is_watched(self) -> bool:
        """Whether a driver job waits that will make the next pass."""
        return bool(self.watchdogs.submitted) or any(map(self.table.seen.count_pending, DRIVERS))

    def query(self) -> None:
        """Take the snapshot that the pass decides by.

        Raises:
            Paused: somebody has cancelled the run's jobs.
        """
        seen, self.first_look = self.first_look, None
        ledger = self.submitter.ledger
        submitted = ledger.load({0})
        snapshot = self._from_before(seen, submitted) if seen else None
        if snapshot is None:
            now = look(self.run.paths, 0.0, SECOND_PATIENCE)
            snapshot = take_snapshot(self.run, now, is_fresh=True)
        self.table = JobTable(ledger, snapshot)
        self.heed_people(self.elements)
        if self.needs_watchdogs:
            self.needs_watchdogs = False  # a queue that does not show them yet must not get them twice
            self.watchdogs.ensure(snapshot)

    def heed_people(self, elements: Sequence[Element]) -> None:
        """Do nothing further if somebody has cancelled the run's jobs.

        Args:
            elements: the run's, as a look shows them.

        Raises:
            Paused: somebody has.
        """
        if act := look_for_act(self.submitter.ledger, elements, self.table.seen.control):
            raise Paused(act)

    def _from_before(self, seen: Look, submitted: Sequence[Submission]) -> Snapshot | None:
        """Return what a look shows that was taken before the lease was; None where it is to be taken again:
        after a pass which finds no driver job that waits, and none that was submitted since, there may be no
        other, so nothing is taken for granted."""
        snapshot = take_snapshot(self.run, seen, is_fresh=self.is_alone)
        since = (s for s in submitted if s.job_kind in DRIVERS and s.state.job and s.created > seen.asked)
        if self.is_alone or any(map(snapshot.count_pending, DRIVERS)) or any(since):
            return snapshot.expecting(submitted)
        return None

    def collect_ended(
        self, tasks: Sequence[Task], committed_of: CommittedOf, newest: Task | None = None
    ) -> list[Ended]:
        """Match what was submitted with what Slurm shows, and explain what ended without a commit."""
        iterations = {task.iteration for task in tasks} | {0}
        self._mend(iterations)
        self.table = read_table(self.submitter.ledger, self.table.seen, iterations, newest)
        if newest is not None:
            self._cancel_requeued(newest)
        gone = self.table.find_gone(committed_of)
        self.confirm_gone((submission.state.job, index) for submission, index in gone)
        found = self._explain([Gone.of(submission, index) for submission, index in gone])
        self.table.note_endings([ended.ending for ended in found])
        self.failures = self.table.failures()
        return found

    def _mend(self, iterations: Collection[int]) -> None:
        for spoilt in mend_endings(self.run.paths, iterations):
            self.note(f"{spoilt}; it was written again from what the other says")

    def _explain(self, gone: Sequence[Gone]) -> list[Ended]:
        """Say why attempts ended without a commit, in their order."""
        seen = self.table.seen
        shown = {(e.array_id, e.index): e for elements in seen.queue.values() for e in elements}
        if not gone:
            return []
        known = (seen.control, self.accounts, time.time(), self.table.taken_back(), self._silenced())
        return explain(self.run.paths, gone, shown, *known)

    def _silenced(self) -> Collection[str]:
        """Return the elements, like ``4711_3``, that were cancelled since nothing was heard of them."""
        return ()

    def confirm_gone(self, elements: Iterable[tuple[str | None, int]]) -> None:
        """Look at the queue once more, before elements are judged as ended that this pass's look does not
        show: that was taken before the lease was, and may be older than they are.

        Args:
            elements: by array ids, None where that is not known, and indices.

        Raises:
            SlurmTimeout: there is no answer, or one of them lives: nothing is judged in this pass.
            Paused: somebody has cancelled the run's jobs.
        """
        seen = self.table.seen
        unseen = {(job, index) for job, index in elements if job and not seen.shows((job, index))}
        if seen.is_fresh or not unseen:
            return
        self.second_look = self.second_look or look(self.run.paths, 0.0, SECOND_PATIENCE)
        if any((e.array_id, e.index) in unseen and is_live(e) for e in self.second_look.elements):
            raise SlurmTimeout(["squeue"], None, "it did not show a job that is there")
        self.heed_people(self.second_look.elements_of(lambda name: is_job_of(self.run.identity.id, name)))

    def _cancel_requeued(self, update: Task) -> None:
        """Cancel a job that waits to start again although its policy is committed: it would find nothing to
        do, and the next update waits for its end."""
        live = self.table.live.get(update)
        if live is not None and live.element is not None and live.is_pending:
            self.table.note(live.submission, is_withdrawn=True)
            self.errands.cancel([live.carrier.array], only_pending=True)
            self.table.drop(live.submission)

    def note_retracted(self, failure: Failure, attempt: str) -> None:
        invocation = self.table.seen.control.invocation
        self.table.note_endings(retraction(failure, attempt, invocation, time.time()))
        self.failures.setdefault(failure.task, []).append(failure)

    def launch(self, launches: Sequence[Launch], seen: Observation) -> None:
        launcher = Launcher(self.submitter, self.limits, self.table, self.failures, self.note)
        self.refusal = launcher.launch(launches, seen)

    def update_dependencies(self, seen: Observation) -> None:
        """Have what waits for failed jobs wait for what replaces them, and driver jobs for all of it."""
        streaming = self.submitter.config.dependency
        waiting, elements = list(self.table.waiting()), self.table.elements
        for change in rewire(self.run.plan, waiting, committed_in(seen), elements, streaming):
            self._carry_out(change)
        self.watchdogs.watch(self.table)

    def _carry_out(self, change: DependencyUpdate) -> None:
        self.submitter.beat()
        array = change.elements[0].array
        elements = f"{array}_[{array_expression(sorted(e.index for e in change.elements), None)}]"
        try:
            update_dependency(elements, change.dependency)
        except SlurmError as error:  # it has started or ended since it was seen; the next pass sees more
            self.note(f"{elements} could not be told to wait for {change.waits_for}: {error}")
            return
        submission = next(s for s in self.table.submissions if s.state.job == array)
        told = tuple(dict.fromkeys((*submission.state.waits_for, *change.waits_for)))
        self.table.note(submission, waits_for=told)
        journal.event(self.run.paths.events, "rewired", elements=elements, waits_for=change.dependency)
        self.note(
            f"{submission.job_kind} of iteration {submission.iteration} now waits for job "
            f"{', '.join(change.waits_for) or 'nothing'}"
        )

    def end_all(self) -> None:
        """Cancel every job of the run but for driver jobs that run: they end by themselves."""
        live = [e for e in self.elements if is_live(e)]
        ids = {e.array_id for e in live if is_pending(e) or not is_driver_job(e.name)}
        self.errands.cancel([*self.watchdogs.submitted, *sorted(ids, key=int)], only_pending=False)

    def withdraw(self) -> int:
        """Cancel every job of the run that waits, as it is at its end; what runs may end, and its commits
        count. Returns how many arrays. Other drivers learn it first: they would take it for a person's act.
        """
        control = read_control(self.run.paths)
        if control.withdrawn != control.invocation:
            write_control(self.run.paths, replace(control, withdrawn=control.invocation))
        arrays = arrays_of(self.table.seen.queue.values(), only_pending=True)
        self.errands.cancel([*self.watchdogs.submitted, *arrays], only_pending=True)
        return len(arrays)
