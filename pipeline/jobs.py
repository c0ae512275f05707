"""The attempts at a run's tasks, wherever they run: what the driver needs to know and to ask."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pipeline import journal
from pipeline.config import Config
from pipeline.observe import explain_failure, in_words, last_attempt_number
from pipeline.reconcile import DISK_EXIT, URGENCY, Failure, FailureKind, GiveUp, Launch, Observation
from pipeline.resources import num_update_ranks
from pipeline.runs import Run
from pipeline.tasks import Stage, Task, task_key
from slurm.scheduler import Job, JobState, JobStatus, Scheduler, rank_log, was_killed

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

    def settle(self, tasks: Sequence[Task], committed_of: CommittedOf) -> Sequence[Ended]:
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

    def tend(self, seen: Observation) -> None:
        """After launching: see to it that what waits, waits for the right thing."""

    def give_up(self, given_up: Sequence[GiveUp]) -> None:
        """The run cannot go on: nothing that waits needs to start."""


@dataclass(frozen=True)
class _Attempt:
    task: Task
    number: int


@dataclass
class LocalJobs:
    """Attempts as jobs of this machine: they live no longer than this process, and so does what is known."""

    run: Run
    scheduler: Scheduler
    horizon: int = 0
    failures: dict[Task, list[Failure]] = field(default_factory=dict)
    _attempts: dict[str, _Attempt] = field(default_factory=dict)
    _ended: dict[str, JobStatus] = field(default_factory=dict)

    @property
    def live(self) -> Collection[Task]:
        return {attempt.task for attempt in self._attempts.values()}

    def query(self) -> None:
        for key, status in self.scheduler.query().items():
            if status.state is JobState.ENDED and key in self._attempts:
                self._ended[key] = status

    def settle(self, tasks: Sequence[Task], committed_of: CommittedOf) -> list[Ended]:
        found = []
        committed = committed_of([self._attempts[key].task for key in self._ended])
        for key, status in self._ended.items():
            attempt = self._attempts.pop(key)
            self.scheduler.forget(key)
            if attempt.task not in committed:
                found.append(self._explain(attempt, status))
        self._ended.clear()
        return found

    def _explain(self, attempt: _Attempt, status: JobStatus) -> Ended:
        log = rank_log(self.run.paths.task(attempt.task).log(attempt.number), status.rank)
        why = status.note or in_words(status.exit_code)
        kind = FailureKind.DISK if status.exit_code == DISK_EXIT else FailureKind.KILLED
        unsaid = Failure(attempt.task, attempt.number, kind, why, str(log))
        failure, suspect = explain_failure(self.run.paths, unsaid)
        if failure is not unsaid and ranks_of(self.run.config, attempt.task) > 1:
            failure, suspect = _of_ranks(failure, suspect, unsaid, status)
        self.failures.setdefault(attempt.task, []).append(failure)
        return Ended(failure, suspect)

    def note_retracted(self, failure: Failure) -> None:
        self.failures.setdefault(failure.task, []).append(failure)

    def launch(self, launches: Sequence[Launch], seen: Observation) -> None:
        jobs, rows = zip(*map(self._job, launches), strict=True)
        journal.append(self.run.paths.events, *rows)  # one flush, however many shards
        self.scheduler.submit(jobs)

    def _job(self, item: Launch) -> tuple[Job, dict[str, object]]:
        """A new attempt as a job, and the event that says so."""
        task, paths = item.task, self.run.paths
        number = last_attempt_number(paths, task) + 1
        attempt = f"{number}-{os.urandom(4).hex()}"
        key = f"{task_key(task)}#{attempt}"
        self._attempts[key] = _Attempt(task, number)
        event = journal.event_row("launched", task=task_key(task), attempt=attempt, reason=item.reason)
        arguments = stage_arguments(self.run, task, number, attempt)
        log = paths.task(task).log(number)
        ranks = ranks_of(self.run.config, task)
        return Job(key, task.purpose, arguments, log, priority=URGENCY[task.stage], ranks=ranks), event

    def tend(self, seen: Observation) -> None:
        """Jobs of this machine wait for nothing."""

    def give_up(self, given_up: Sequence[GiveUp]) -> None:
        """What is queued is dropped when the driver ends."""


def ranks_of(config: Config, task: Task) -> int:
    """Processes that do a task of this machine together."""
    return num_update_ranks(config) if task.stage is Stage.UPDATE else 1


def _of_ranks(
    said: Failure, suspect: Task | None, unsaid: Failure, status: JobStatus
) -> tuple[Failure, Task | None]:
    """The failure of a task of several ranks, one of which left a word.

    One that was killed leaves none: the word is then another's, who found out that its peer was gone.
    """
    if was_killed(status.exit_code):
        return unsaid, None
    return replace(said, message=f"{said.message} ({unsaid.message})"), suspect


def stage_arguments(run: Run, task: Task, number: int, attempt: str) -> tuple[str, ...]:
    """Words after ``python -m stages`` for one attempt."""
    return (*common_arguments(run, task, attempt), *own_arguments(run, task, number))


def common_arguments(run: Run, task: Task, attempt: str) -> tuple[str, ...]:
    """Those that all tasks of a purpose and an iteration share."""
    return (
        task.stage,
        *(("--pool", task.pool) if task.pool else ()),
        *("--run-dir", str(run.paths.root)),
        *("--iteration", str(task.iteration)),
        *("--attempt", attempt),
    )


def own_arguments(run: Run, task: Task, number: int) -> tuple[str, ...]:
    """Those of one shard alone."""
    return ("--shard", str(task.shard), "--failure-file", str(run.paths.task(task).failure(number)))
