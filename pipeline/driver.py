"""The loop: observe, reconcile, act. It may be killed at any moment and started again anywhere."""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType
from typing import Protocol

from pipeline import journal
from pipeline.bookkeeping import Books
from pipeline.jobs import Ended, Jobs, LocalJobs
from pipeline.lease import HEARTBEAT_SECONDS, Lease, hold
from pipeline.notify import newest_commit, tell_if_stalled
from pipeline.observe import Frontier, Records, find_frontier, move_aside
from pipeline.plan import policy_maker, unique
from pipeline.reconcile import Actions, Failure, FailureKind, GiveUp, Observation, Retract, reconcile
from pipeline.runs import Run
from pipeline.tasks import PREPARE, Task, task_key
from pipeline.tracking import open_tracker
from slurm.scheduler import Scheduler

_LONG_PASS_SECONDS = 0.1
_REST_FACTOR = 4


class Outcome(StrEnum):
    """How a call of the driver ended."""

    COMPLETE = "complete"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"


class Watcher(Protocol):
    """Is told what happens; shows it to a person."""

    def progress(self, frontier: Frontier, records: Records, tasks: tuple[Task, ...]) -> None:
        """Called after every pass."""

    def row(self, row: dict[str, float | int]) -> None:
        """A new row of metrics.jsonl."""

    def note(self, text: str) -> None:
        """Something a person wants to know: a retry, a repair."""


@dataclass
class Driver:
    """State of one call or pass: everything in it can be derived again from the disk and the scheduler."""

    run: Run
    jobs: Jobs
    watcher: Watcher
    books: Books
    records: Records
    frontier: Frontier
    given_up: tuple[GiveUp, ...] = ()

    @staticmethod
    def of(run: Run, jobs: Jobs, watcher: Watcher, books: Books) -> "Driver":
        return Driver(run, jobs, watcher, books, Records(run.paths), find_frontier(run.plan, run.paths))

    @property
    def is_complete(self) -> bool:
        plan = self.run.plan
        is_trained = self.frontier.updated >= plan.iterations
        return is_trained and self.frontier.evaluated == len(plan.evaluations())


def drive(run: Run, scheduler: Scheduler, watcher: Watcher) -> tuple[Outcome, tuple[GiveUp, ...]]:
    """Advance on this machine until the run is complete, cannot go on, or is interrupted.

    Raises:
        LeaseHeld: another driver is at work on the run.
    """
    with hold(run.paths.locks) as lease, interruptible():
        journal.event(run.paths.events, "driver_started", host=lease.holder.host, pid=lease.holder.pid)
        books = Books.open(run, open_tracker(run, watcher.note))
        driver = Driver.of(run, LocalJobs(run, scheduler), watcher, books)
        outcome = Outcome.FAILED
        try:
            outcome = loop(driver, scheduler, lease)
        except KeyboardInterrupt:
            outcome = Outcome.INTERRUPTED
        finally:
            scheduler.cancel()
            books.close(outcome is Outcome.COMPLETE)
            journal.event(run.paths.events, "driver_ended", outcome=outcome)
        return outcome, driver.given_up


def loop(driver: Driver, scheduler: Scheduler, lease: Lease) -> Outcome:
    """The whole of a run, one pass at a time."""
    while True:
        lease.beat()
        started = time.monotonic()
        actions = advance(driver)
        if not driver.is_complete and not actions.give_up:
            newest = newest_commit(driver.records)
            tell_if_stalled(driver.run, newest, lease.holder.acquired, driver.watcher.note)
        # A pass looks at every shard of the iteration: with thousands, not one pass per ended job.
        if (seconds := time.monotonic() - started) > _LONG_PASS_SECONDS:
            time.sleep(min(_REST_FACTOR * seconds, HEARTBEAT_SECONDS))
        if driver.is_complete:
            return Outcome.COMPLETE
        if actions.give_up:
            driver.given_up = actions.give_up
            return Outcome.FAILED
        if not actions.retract:
            assert driver.jobs.live, f"nothing runs and nothing is left to do at {driver.frontier}"
            scheduler.wait(HEARTBEAT_SECONDS)


def advance(driver: Driver) -> Actions:
    """One pass: observe the disk and the scheduler, decide, act. Idempotent."""
    seen = observe(driver)
    max_attempts = driver.run.config.scheduler.max_attempts
    actions = reconcile(driver.run.plan, seen, max_attempts, in_advance=driver.jobs.horizon > 0)
    act(driver, actions, seen)
    driver.watcher.progress(driver.frontier, driver.records, tuple(seen.tasks))
    return actions


def observe(driver: Driver) -> Observation:
    """Ended jobs, new commits, and how far the run has come by now."""
    jobs, records = driver.jobs, driver.records
    jobs.query()
    tasks = look(driver)
    for ended in jobs.settle(tasks, lambda task: records.get(task) is not None or task in records.corrupt):
        take_note(driver, ended)
    return Observation(tasks, records.committed(), dict(records.corrupt), jobs.live, jobs.failures)


def look(driver: Driver) -> tuple[Task, ...]:
    """Read new commits, move the frontier along, write the rows that are due. Returns the window."""
    plan, records, books = driver.run.plan, driver.records, driver.books
    while True:
        tasks = plan.window(driver.frontier.updated, driver.frontier.evaluated, driver.jobs.horizon)
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
    for note in books.thin(driver.frontier):
        driver.watcher.note(note)
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
    if updated < 0:
        updated = plan.start if PREPARE in known else updated
    elif updated < plan.iterations and policy_maker(updated + 1) in known:
        updated += 1
    evaluations = plan.evaluation_tasks()
    # Nothing counts before prepare does: when its commit was taken back, others may still stand.
    if updated >= 0 and evaluated < len(evaluations) and evaluations[evaluated] in known:
        evaluated += 1
    return Frontier(updated, evaluated)


def take_note(driver: Driver, ended: Ended) -> None:
    """Write down a failed attempt, and look closely at the input that it suspects."""
    failure = ended.failure
    journal.event(
        driver.run.paths.events,
        "failed",
        task=task_key(failure.task),
        attempt=failure.attempt,
        kind=failure.kind,
        message=failure.message,
        job=failure.job,
        node=failure.node,
    )
    driver.watcher.note(f"{failure.task}, attempt {failure.attempt}: {failure.message}")
    if ended.suspect is not None:
        driver.records.doubt(ended.suspect)


def act(driver: Driver, actions: Actions, seen: Observation) -> None:
    """Carry out what was decided. Retracting comes first: a launch must not see what is being taken back."""
    if actions.retract:
        take_back(driver, actions.retract)
    if actions.give_up:
        driver.jobs.give_up(actions.give_up)
        return
    if actions.launch:
        driver.jobs.launch(actions.launch, seen)
    driver.jobs.tend(seen)


def take_back(driver: Driver, retracts: Sequence[Retract]) -> None:
    """Move what does not stand aside, and look anew how far the run has come."""
    label = task_key(retracts[0].task).replace("/", "-")
    more = f"-and-{len(retracts) - 1}-more" if len(retracts) > 1 else ""
    target = move_aside(driver.run.paths, [retract.task for retract in retracts], label + more)
    for retract in retracts:
        driver.records.forget(retract.task)
        # Counted like an attempt that failed for its inputs: a disk that spoils every commit ends the run.
        driver.jobs.note_retracted(Failure(retract.task, 0, FailureKind.INPUTS, retract.reason))
        journal.event(
            driver.run.paths.events,
            "retracted",
            task=task_key(retract.task),
            reason=retract.reason,
            moved_to=str(target),
        )
        driver.watcher.note(f"{retract.task} will be computed again: {retract.reason}")
    driver.frontier = find_frontier(driver.run.plan, driver.run.paths)


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
