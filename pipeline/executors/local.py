"""A run on one machine: its attempts as processes, and the loop that drives them."""

import contextlib
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pipeline.config.allocation import AllocationConfig
from pipeline.config.schema import Config
from pipeline.executors.allocation import step_arguments
from pipeline.executors.processes import LocalExecutor
from pipeline.executors.running import Job, JobEnd, rank_log, was_killed
from pipeline.orchestrate.driver import Driver, Outcome, Pass, Watcher, tell_of_pass
from pipeline.orchestrate.jobs import CommittedOf, Ended
from pipeline.orchestrate.publish import Publisher
from pipeline.orchestrate.reconcile import Launch, Observation
from pipeline.process import interruptible
from pipeline.run import journal
from pipeline.run.attempts import new_attempt
from pipeline.run.directory import Run
from pipeline.run.endings import Ending, Evidence, note_endings, retraction
from pipeline.run.failures import DISK_EXIT, Failure, FailureKind, Said, last_attempt_number, read_said
from pipeline.run.invocation import stage_arguments
from pipeline.run.lease import HEARTBEAT_SECONDS, Lease, hold
from pipeline.run.place import settle
from pipeline.run.tasks import URGENCY, Stage, Task, task_key
from pipeline.text import exit_in_words
from pipeline.tracking.tracker import open_tracker


@dataclass
class LocalJobs:
    """Attempts as processes of this machine. They end with the driver, and what counts against their tasks is
    kept in memory: of an earlier driver nothing does."""

    run: Run
    executor: LocalExecutor
    failures: dict[Task, list[Failure]] = field(default_factory=dict)
    _attempts: dict[str, tuple[Task, int]] = field(default_factory=dict)
    """Task and number of each attempt that runs, by the key of its job."""
    _ended: dict[str, JobEnd] = field(default_factory=dict)

    @property
    def live(self) -> Collection[Task]:
        return {task for task, _ in self._attempts.values()}

    def query(self) -> None:
        self._ended |= self.executor.collect_ended()

    def collect_ended(
        self, tasks: Sequence[Task], committed_of: CommittedOf, newest: Task | None = None
    ) -> list[Ended]:
        found = []
        committed = committed_of([self._attempts[key][0] for key in self._ended])
        for key, end in self._ended.items():
            task, number = self._attempts.pop(key)
            if task not in committed:
                found.append(self._explain(task, key.partition("#")[2], number, end))
        self._ended.clear()
        note_endings(self.run.paths, (ended.ending for ended in found))
        return found

    def _explain(self, task: Task, attempt: str, number: int, end: JobEnd) -> Ended:
        log = rank_log(self.run.paths.task(task).log(number), end.rank)
        said = read_said(self.run.paths, task, number)
        kind, message, evidence = judge(said, end, ranks_of(self.run.config, task))
        ending = Ending(
            *(attempt, task_key(task), number, 0, kind, evidence, message),
            node=said.host if said else "",
            started=said.started if said else None,
            time=(said.ended if said else None) or time.time(),
            log=self.run.paths.relative(log),
        )
        failure = ending.failure(self.run.paths)
        self.failures.setdefault(task, []).append(failure)
        suspect = said.suspected if said and evidence is Evidence.FAILURE_FILE else None
        return Ended(failure, ending, suspect)

    def note_retracted(self, failure: Failure, attempt: str) -> None:
        note_endings(self.run.paths, retraction(failure, attempt, 0, time.time()))
        self.failures.setdefault(failure.task, []).append(failure)

    def launch(self, launches: Sequence[Launch], seen: Observation) -> None:
        if not launches:
            return
        jobs, rows = zip(*map(self._job, launches), strict=True)
        journal.append(self.run.paths.events, *rows)  # one flush, however many shards
        self.executor.submit(jobs)

    def _job(self, item: Launch) -> tuple[Job, dict[str, object]]:
        """Return a new attempt as a job, and the journal's event of its launch."""
        task, paths = item.task, self.run.paths
        number = last_attempt_number(paths, task) + 1
        attempt = new_attempt(number)
        key = f"{task_key(task)}#{attempt}"
        self._attempts[key] = task, number
        event = journal.event_row("launched", task=task_key(task), attempt=attempt, reason=item.reason)
        is_step = isinstance(self.run.config.scheduler, AllocationConfig)
        arguments = (step_arguments if is_step else stage_arguments)(self.run, task, number, attempt)
        log = paths.task(task).log(number)
        ranks = ranks_of(self.run.config, task)
        return Job(key, task.job_kind, arguments, log, priority=URGENCY[task.stage], ranks=ranks), event


def ranks_of(config: Config, task: Task) -> int:
    """Return the number of processes of this machine that do a task together: of a job step, one is here."""
    if isinstance(config.scheduler, AllocationConfig):
        return 1
    return config.scheduler.num_update_ranks if task.stage is Stage.UPDATE else 1


def judge(said: Said | None, end: JobEnd, ranks: int) -> tuple[FailureKind, str, Evidence]:
    """Decide why an attempt of this machine ended without a commit. Pure.

    Args:
        said: its failure file. A rank that was killed leaves none: of several ranks the file is then
            another's, which only found its peer gone.
        ranks: number of its processes.
    """
    unspoken = " and said nothing" if end.exit_code >= 0 else ""
    why = end.note or f"{exit_in_words(end.exit_code)}{unspoken}"
    if said is None or (ranks > 1 and was_killed(end.exit_code)):
        kind = FailureKind.DISK if end.exit_code == DISK_EXIT else FailureKind.KILLED
        return kind, why, Evidence.EXIT_CODE
    message = f"{said.message} ({why})" if ranks > 1 else said.message
    return said.kind, message, Evidence.FAILURE_FILE


_LONG_PASS_SECONDS, _REST_FACTOR = 0.1, 4


def drive(
    run: Run, executor: LocalExecutor, watcher: Watcher, held: Lease | None = None, patience: float = 0.0
) -> Pass:
    """Make passes on this machine until the run is complete, cannot go on, or is interrupted.

    Args:
        held: the lease, if the caller has it.
        patience: seconds to wait for a driver that holds it.

    Raises:
        LeaseHeld: another driver is at work on the run.
    """
    leased = contextlib.nullcontext(held) if held else hold(run.paths.locks, patience)
    # SIGUSR2: what sbatch --signal=B:USR2@SECONDS sends before the time limit
    with leased as lease, interruptible(signal.SIGUSR2):
        journal.event(run.paths.events, "driver_started", host=lease.holder.host, pid=lease.holder.pid)
        run = settle(run)
        books = Publisher(run, open_tracker(run, watcher.note))
        driver = Driver(run, LocalJobs(run, executor), watcher, books)
        done = Pass(Outcome.FAILED)
        try:
            done = _loop(driver, executor, lease)
        except KeyboardInterrupt:
            done = Pass(Outcome.INTERRUPTED)
        finally:
            executor.cancel()
            with driver.never_in_the_way():
                books.close(done.outcome is Outcome.COMPLETE)
            journal.event(run.paths.events, "driver_ended", outcome=done.outcome)
        return done


def _loop(driver: Driver, executor: LocalExecutor, lease: Lease) -> Pass:
    """Make passes until the run has ended. Returns the last."""
    since = None
    while True:
        lease.beat()
        started = time.monotonic()
        actions = driver.one_pass()
        done = driver.result_of(actions)
        if done.outcome is None:
            tell_of_pass(driver.run, done, lease.holder.acquired, driver.watcher.note)
        # A pass looks at every shard of the iteration: with thousands, not one pass per ended job.
        if (seconds := time.monotonic() - started) > _LONG_PASS_SECONDS:
            time.sleep(min(_REST_FACTOR * seconds, HEARTBEAT_SECONDS))
        if done.outcome is Outcome.FAILED:
            _let_states_finish(executor, lease)
            return done
        if driver.is_complete and driver.has_whole_chain():
            if not driver.writes_state:
                return done
            executor.wait(HEARTBEAT_SECONDS)
        elif driver.lacks_rows_only:
            since = since or time.monotonic()
            driver.wait_for_rows(since)
        elif done.outcome is None and not actions.needs_another_pass:
            assert driver.jobs.live, f"nothing runs and nothing is left to do at {driver.frontier}"
            executor.wait(HEARTBEAT_SECONDS)


def _let_states_finish(executor: LocalExecutor, lease: Lease) -> None:
    """Stop what runs, but for jobs that only write what their committed result left to save."""
    executor.cancel(spares_committed=True)
    while executor.is_busy:
        lease.beat()
        executor.wait(HEARTBEAT_SECONDS)
        executor.collect_ended()
