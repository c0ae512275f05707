"""A run on one machine: its attempts as processes, and the loop that drives them."""

import contextlib
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from pipeline.config.schema import Config
from pipeline.executors.scheduler import Job, JobState, JobStatus, Scheduler, rank_log, was_killed
from pipeline.orchestrate.driver import (
    Driver,
    Outcome,
    Watcher,
    advance,
    has_whole_chain,
    never_in_the_way,
    tell_on_the_way,
    wait_for_rows,
)
from pipeline.orchestrate.jobs import CommittedOf, Ended
from pipeline.orchestrate.publish import Publisher
from pipeline.orchestrate.reconcile import Launch, Observation
from pipeline.process import interruptible
from pipeline.run import journal
from pipeline.run.directory import Run
from pipeline.run.failures import (
    DISK_EXIT,
    Failure,
    FailureKind,
    GiveUp,
    explain_failure,
    last_attempt_number,
)
from pipeline.run.invocation import stage_arguments
from pipeline.run.lease import HEARTBEAT_SECONDS, Lease, hold
from pipeline.run.tasks import URGENCY, Stage, Task, task_key
from pipeline.text import in_words
from pipeline.tracking.tracker import open_tracker


@dataclass(frozen=True)
class _Attempt:
    task: Task
    number: int


@dataclass
class LocalJobs:
    """Attempts as processes of this machine. They end with the driver, and state is kept in memory only."""

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

    def collect_ended(self, tasks: Sequence[Task], committed_of: CommittedOf) -> list[Ended]:
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
        """Return a new attempt as a job, and the journal's event of its launch."""
        task, paths = item.task, self.run.paths
        number = last_attempt_number(paths, task) + 1
        attempt = f"{number}-{os.urandom(4).hex()}"
        key = f"{task_key(task)}#{attempt}"
        self._attempts[key] = _Attempt(task, number)
        event = journal.event_row("launched", task=task_key(task), attempt=attempt, reason=item.reason)
        arguments = stage_arguments(self.run, task, number, attempt)
        log = paths.task(task).log(number)
        ranks = ranks_of(self.run.config, task)
        return Job(key, task.job_kind, arguments, log, priority=URGENCY[task.stage], ranks=ranks), event

    def update_dependencies(self, seen: Observation) -> None:
        """Do nothing: jobs of this machine have no dependencies."""

    def give_up(self, given_up: Sequence[GiveUp]) -> None:
        """Do nothing: the driver then ends, and cancels what is queued and what runs."""


def ranks_of(config: Config, task: Task) -> int:
    """Return the number of processes that do a task together on this machine."""
    return config.scheduler.num_update_ranks if task.stage is Stage.UPDATE else 1


def _of_ranks(
    said: Failure, suspect: Task | None, unsaid: Failure, status: JobStatus
) -> tuple[Failure, Task | None]:
    """Return the failure of a task of several ranks, one of which left a failure file.

    A rank that was killed leaves none: the file is then another rank's, which only found its peer gone.
    """
    if was_killed(status.exit_code):
        return unsaid, None
    return replace(said, message=f"{said.message} ({unsaid.message})"), suspect


_LONG_PASS_SECONDS = 0.1


_REST_FACTOR = 4


def drive(
    run: Run, scheduler: Scheduler, watcher: Watcher, held: Lease | None = None
) -> tuple[Outcome, tuple[GiveUp, ...]]:
    """Advance on this machine until the run is complete, cannot go on, or is interrupted.

    Args:
        held: the lease, if the caller has it.

    Raises:
        LeaseHeld: another driver is at work on the run.
    """
    with contextlib.nullcontext(held) if held else hold(run.paths.locks) as lease, interruptible():
        journal.event(run.paths.events, "driver_started", host=lease.holder.host, pid=lease.holder.pid)
        books = Publisher(run, open_tracker(run, watcher.note))
        driver = Driver.of(run, LocalJobs(run, scheduler), watcher, books)
        outcome = Outcome.FAILED
        try:
            outcome = loop(driver, scheduler, lease)
        except KeyboardInterrupt:
            outcome = Outcome.INTERRUPTED
        finally:
            scheduler.cancel()
            with never_in_the_way(driver):
                books.close(outcome is Outcome.COMPLETE)
            journal.event(run.paths.events, "driver_ended", outcome=outcome)
        return outcome, driver.given_up


def loop(driver: Driver, scheduler: Scheduler, lease: Lease) -> Outcome:
    """Make passes until the run has ended."""
    since = None
    while True:
        lease.beat()
        started = time.monotonic()
        actions = advance(driver)
        if not driver.is_complete and not actions.give_up:
            tell_on_the_way(driver, lease.holder.acquired)
        # A pass looks at every shard of the iteration: with thousands, not one pass per ended job.
        if (seconds := time.monotonic() - started) > _LONG_PASS_SECONDS:
            time.sleep(min(_REST_FACTOR * seconds, HEARTBEAT_SECONDS))
        if driver.is_complete:
            if has_whole_chain(driver):
                return Outcome.COMPLETE
            continue
        if actions.give_up:
            driver.given_up = actions.give_up
            return Outcome.FAILED
        if driver.lacks_rows_only:
            since = since or time.monotonic()
            wait_for_rows(driver, since)
        elif not actions.retract:
            assert driver.jobs.live, f"nothing runs and nothing is left to do at {driver.frontier}"
            scheduler.wait(HEARTBEAT_SECONDS)
