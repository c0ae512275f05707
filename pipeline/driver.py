"""The loop: observe, reconcile, act. It may be killed at any moment and started again anywhere."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import FrameType
from typing import Any, Protocol

from pipeline import journal
from pipeline.bookkeeping import Books
from pipeline.lease import HEARTBEAT_SECONDS, Lease, hold
from pipeline.observe import (
    Frontier,
    Records,
    explain_failure,
    find_frontier,
    last_attempt_number,
    move_aside,
)
from pipeline.plan import policy_maker, unique
from pipeline.reconcile import (
    URGENCY,
    Actions,
    Failure,
    FailureKind,
    GiveUp,
    Launch,
    Observation,
    Retract,
    reconcile,
)
from pipeline.runs import Run
from pipeline.tasks import PREPARE, Task, task_key
from slurm.scheduler import Job, JobState, JobStatus, Scheduler

_LONG_PASS_SECONDS = 0.1
_REST_FACTOR = 4


class Outcome(StrEnum):
    """How a call of the driver ended."""

    COMPLETE = "complete"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class Watcher(Protocol):
    """Is told what happens; shows it to a person."""

    def progress(self, frontier: Frontier, records: Records, tasks: tuple[Task, ...]) -> None:
        """Called after every pass."""

    def row(self, row: dict[str, float | int]) -> None:
        """A new row of metrics.jsonl."""

    def note(self, text: str) -> None:
        """Something a person wants to know: a retry, a repair."""


@dataclass
class Attempt:
    """One job of ours."""

    task: Task
    number: int


@dataclass
class Driver:
    """State of one call: everything in it can be derived again from the disk and the scheduler."""

    run: Run
    scheduler: Scheduler
    watcher: Watcher
    books: Books
    records: Records
    frontier: Frontier
    attempts: dict[str, Attempt] = field(default_factory=dict)
    """Job key -> attempt, of jobs that have not ended."""
    failures: dict[Task, list[Failure]] = field(default_factory=dict)
    given_up: tuple[GiveUp, ...] = ()

    @property
    def is_complete(self) -> bool:
        plan = self.run.plan
        is_trained = self.frontier.updated >= plan.iterations
        return is_trained and self.frontier.evaluated == len(plan.evaluations())


def drive(run: Run, scheduler: Scheduler, watcher: Watcher) -> tuple[Outcome, tuple[GiveUp, ...]]:
    """Advance until the run is complete, cannot go on, or is interrupted.

    Raises:
        LeaseHeld: another driver is at work on the run.
    """
    with hold(run.paths.locks) as lease, interruptible():
        journal.event(run.paths.events, "driver_started", host=lease.holder.host, pid=lease.holder.pid)
        records = Records(run.paths)
        books = Books.open(run, watcher.note)
        driver = Driver(run, scheduler, watcher, books, records, find_frontier(run.plan, run.paths))
        outcome = Outcome.FAILED
        try:
            outcome = loop(driver, lease)
        except KeyboardInterrupt:
            outcome = Outcome.INTERRUPTED
        finally:
            scheduler.cancel()
            books.close(outcome is Outcome.COMPLETE)
            journal.event(run.paths.events, "driver_ended", outcome=outcome)
        return outcome, driver.given_up


def loop(driver: Driver, lease: Lease) -> Outcome:
    """The whole of a run, one pass at a time."""
    while True:
        lease.beat()
        started = time.monotonic()
        actions = advance(driver)
        # A pass looks at every shard of the iteration: with thousands, not one pass per ended job.
        if (seconds := time.monotonic() - started) > _LONG_PASS_SECONDS:
            time.sleep(min(_REST_FACTOR * seconds, HEARTBEAT_SECONDS))
        if driver.is_complete:
            return Outcome.COMPLETE
        if actions.give_up:
            driver.given_up = actions.give_up
            return Outcome.FAILED
        if not actions.retract:
            assert driver.attempts, f"nothing runs and nothing is left to do at {driver.frontier}"
            driver.scheduler.wait(HEARTBEAT_SECONDS)


def advance(driver: Driver) -> Actions:
    """One pass: observe the disk and the scheduler, decide, act. Idempotent."""
    seen = observe(driver)
    actions = reconcile(driver.run.plan, seen, driver.run.config.scheduler.max_attempts)
    act(driver, actions)
    driver.watcher.progress(driver.frontier, driver.records, tuple(seen.tasks))
    return actions


def observe(driver: Driver) -> Observation:
    """Ended jobs, new commits, and how far the run has come by now."""
    statuses = driver.scheduler.query()
    tasks = look(driver)
    for key, status in statuses.items():
        if status.state is JobState.ENDED and key in driver.attempts:
            settle(driver, key, status)
    live = {attempt.task for attempt in driver.attempts.values()}
    committed, corrupt = driver.records.committed(), dict(driver.records.corrupt)
    return Observation(tasks, committed, corrupt, live, driver.failures)


def look(driver: Driver) -> tuple[Task, ...]:
    """Read new commits, move the frontier along, write the rows that are due. Returns the window."""
    plan, records, books = driver.run.plan, driver.records, driver.books
    while True:
        tasks = plan.window(driver.frontier.updated, driver.frontier.evaluated)
        around = unique(*tasks, *(source for task in tasks for source in plan.inputs(task)))
        records.refresh(around)
        moved = find_moved(driver)
        if moved == driver.frontier:
            break
        if driver.frontier.updated < 0:
            note_rejected(driver)
        driver.frontier = moved
    for row in books.write_rows(records, driver.frontier):
        driver.watcher.row(row)
    records.keep_only({*around, *books.wanted(driver.frontier)})
    return tasks


def note_rejected(driver: Driver) -> None:
    """Say how many prompts were left out, and where they are listed."""
    record = driver.records.known[PREPARE]
    if count := int(record.metrics.get("rejected", 0)):
        listing = next(entry.path for entry in record.outputs if entry.path.endswith(".jsonl"))
        where = driver.run.paths.root / listing
        driver.watcher.note(f"{count} prompt rows cannot be used and are left out; listed in {where}")


def find_moved(driver: Driver) -> Frontier:
    """The frontier after the commits that are known now."""
    plan, known = driver.run.plan, driver.records.known
    updated, evaluated = driver.frontier.updated, driver.frontier.evaluated
    if updated < plan.iterations and policy_maker(updated + 1) in known:
        updated += 1
    evaluations = plan.evaluation_tasks()
    if evaluated < len(evaluations) and evaluations[evaluated] in known:
        evaluated += 1
    return Frontier(updated, evaluated)


def settle(driver: Driver, key: str, status: JobStatus) -> None:
    """Take note of an ended attempt. Whether its task is done is the commit record's word alone."""
    attempt = driver.attempts.pop(key)
    driver.scheduler.forget(key)
    task = attempt.task
    if driver.records.get(task) is not None:
        return
    paths = driver.run.paths
    failure, suspect = explain_failure(paths, task, attempt.number, status.exit_code, status.note)
    driver.failures.setdefault(task, []).append(failure)
    journal.event(
        paths.events,
        "failed",
        task=task_key(task),
        attempt=attempt.number,
        kind=failure.kind,
        message=failure.message,
    )
    driver.watcher.note(f"{task}, attempt {attempt.number}: {failure.message}")
    if suspect is not None:
        driver.records.doubt(suspect)


def act(driver: Driver, actions: Actions) -> None:
    """Carry out what was decided. Retracting comes first: a launch must not see what is being taken back."""
    if actions.retract:
        take_back(driver, actions.retract)
    if actions.launch:
        jobs, rows = zip(*(launch(driver, item) for item in actions.launch), strict=True)
        journal.append(driver.run.paths.events, *rows)  # one flush, however many shards
        driver.scheduler.submit(jobs)


def take_back(driver: Driver, retracts: Sequence[Retract]) -> None:
    """Move what does not stand aside, and look anew how far the run has come."""
    label = task_key(retracts[0].task).replace("/", "-")
    more = f"-and-{len(retracts) - 1}-more" if len(retracts) > 1 else ""
    target = move_aside(driver.run.paths, [retract.task for retract in retracts], label + more)
    for retract in retracts:
        driver.records.forget(retract.task)
        # Counted like an attempt that failed for its inputs: a disk that spoils every commit ends the run.
        spoiled = Failure(retract.task, 0, FailureKind.INPUTS, retract.reason)
        driver.failures.setdefault(retract.task, []).append(spoiled)
        journal.event(
            driver.run.paths.events,
            "retracted",
            task=task_key(retract.task),
            reason=retract.reason,
            moved_to=str(target),
        )
        driver.watcher.note(f"{retract.task} will be computed again: {retract.reason}")
    driver.frontier = find_frontier(driver.run.plan, driver.run.paths)


def launch(driver: Driver, item: Launch) -> tuple[Job, dict[str, Any]]:
    """A new attempt as a job, and the event that says so."""
    task, paths = item.task, driver.run.paths
    number = last_attempt_number(paths, task) + 1
    attempt = f"{number}-{os.urandom(4).hex()}"
    key = f"{task_key(task)}#{attempt}"
    driver.attempts[key] = Attempt(task, number)
    files = paths.task(task)
    event = journal.event_row("launched", task=task_key(task), attempt=attempt, reason=item.reason)
    arguments = (
        task.stage,
        *("--run-dir", str(paths.root)),
        *("--iteration", str(task.iteration)),
        *("--shard", str(task.shard)),
        *("--attempt", attempt),
        *("--failure-file", str(files.failure(number))),
    )
    return Job(key, task.stage, arguments, files.log(number), priority=URGENCY[task.stage]), event


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM end the run as Ctrl-C does: tasks stopped, lease released, W&B finished."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
