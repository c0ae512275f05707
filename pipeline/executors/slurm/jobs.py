"""The attempts at a run's tasks as Slurm's array jobs.

Nothing is remembered between passes but what is on disk (:mod:`pipeline.run.submissions`) and in Slurm's
queue: :class:`JobTable` matches the two, :class:`Launcher` submits arrays, :class:`Watchdogs` keeps driver
jobs in the queue.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.config.scheduler import SlurmConfig
from pipeline.executors.slurm.dependencies import DependencyUpdate, committed_in, rewire
from pipeline.executors.slurm.exit_reasons import explain
from pipeline.executors.slurm.job_table import JobTable
from pipeline.executors.slurm.launcher import Launcher
from pipeline.executors.slurm.queue import cancel_jobs, read_run_queue
from pipeline.executors.slurm.submitter import Submitter
from pipeline.executors.slurm.watchdogs import Watchdogs
from pipeline.orchestrate.jobs import CommittedOf, Ended
from pipeline.orchestrate.reconcile import Launch, Observation
from pipeline.run import journal
from pipeline.run.control import read_control, write_control
from pipeline.run.directory import Run
from pipeline.run.failures import Failure
from pipeline.run.submissions import Ending, Ledger
from pipeline.run.tasks import Task, task_key
from slurm.commands import SlurmError
from slurm.limits import ClusterLimits
from slurm.submission import Refused, array_expression, cancel, update_dependency


@dataclass
class SlurmJobs:
    """The jobs of a run, in one pass."""

    run: Run
    submitter: Submitter
    table: JobTable
    launcher: Launcher
    watchdogs: Watchdogs
    note: Callable[[str], None]
    refusal: Refused | None = None
    """The job that Slurm refused in this pass; the rest of the pass was done all the same."""
    _is_snapshot_new: bool = False
    """Whether the queue was read for the watchdogs, and not yet for a pass."""

    @staticmethod
    def of(
        run: Run,
        config: SlurmConfig,
        limits: ClusterLimits,
        submitter: Submitter,
        note: Callable[[str], None],
    ) -> "SlurmJobs":
        table = JobTable(Ledger(run.paths))
        launcher = Launcher(run, config, limits, submitter, table, note)
        return SlurmJobs(
            run, submitter, table, launcher, Watchdogs(run, config, submitter, table, note), note
        )

    @property
    def lookahead(self) -> int:
        return self.launcher.config.horizon

    @property
    def live(self) -> Collection[Task]:
        return self.table.live.keys()

    @property
    def failures(self) -> Mapping[Task, Sequence[Failure]]:
        return self.table.failures

    def ensure_watchdogs(self) -> None:
        """Before the first pass: whatever goes wrong in it, there will be another."""
        self._read_queue()
        self._is_snapshot_new = True
        self.table.load({0})
        self.watchdogs.ensure()

    def query(self) -> None:
        if not self._is_snapshot_new:
            self._read_queue()
        self._is_snapshot_new = False

    def _read_queue(self) -> None:
        self.table.control = read_control(self.run.paths)
        self.table.queue = read_run_queue(self.run)

    def collect_ended(self, tasks: Sequence[Task], committed_of: CommittedOf) -> list[Ended]:
        """Match what was submitted with what Slurm shows, and explain what ended without a commit."""
        table = self.table
        table.load({task.iteration for task in tasks} | {0})
        table.match()
        gone = table.find_gone(committed_of)
        seen = {(e.array_id, e.index): e for elements in table.queue.values() for e in elements}
        found = explain(self.run.paths, gone, seen, dict(table.control.retracted)) if gone else []
        endings: dict[str, dict[str, Ending]] = {}
        for (submission, index), ended in zip(gone, found, strict=True):
            ending = Ending(ended.failure.kind, ended.failure.message, ended.failure.node)
            endings.setdefault(submission.name, {})[str(index)] = ending
        table.note_endings(endings)
        table.count_failures()
        return found

    def note_retracted(self, failure: Failure) -> None:
        control = self.table.control
        entry = (task_key(failure.task), failure.message)
        self.table.control = replace(control, retracted=(*control.retracted, entry))
        write_control(self.run.paths, self.table.control)
        self.table.failures.setdefault(failure.task, []).append(failure)

    def launch(self, launches: Sequence[Launch], seen: Observation) -> None:
        self.refusal = self.launcher.launch(launches, seen)

    def update_dependencies(self, seen: Observation) -> None:
        """Have what waits for failed jobs wait for what replaces them, and driver jobs for all of it."""
        streaming = self.launcher.config.dependency
        waiting, elements = list(self.table.waiting()), self.table.elements
        for change in rewire(self.run.plan, waiting, committed_in(seen), elements, streaming):
            self._carry_out(change)
        self.watchdogs.watch()

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

    def withdraw(self) -> int:
        """Cancel every job of the run that waits; what runs may end, and its commits count. Returns how many
        arrays.
        """
        if self.watchdogs.submitted:
            cancel(self.watchdogs.submitted, only_pending=True)
        return cancel_jobs(self.table.queue.values(), only_pending=True)
