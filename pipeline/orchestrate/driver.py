"""The driver's pass: observe, reconcile, act. It may be killed at any moment and started again anywhere."""

import contextlib
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from pipeline.metrics.advice import Evidence, Rule, first_shown, in_a_line
from pipeline.notify.events import rows_unwritten, tell, tell_if_stalled
from pipeline.orchestrate.jobs import Ended, Jobs
from pipeline.orchestrate.publish import Publisher
from pipeline.orchestrate.reconcile import Actions, Observation, Retract, reconcile
from pipeline.orchestrate.rewind import Point
from pipeline.orchestrate.rewind import take_back as take_history_back
from pipeline.run import journal
from pipeline.run.directory import Run, RunError
from pipeline.run.failures import Failure, FailureKind, GiveUp
from pipeline.run.lineage import find_break
from pipeline.run.packing import unpack
from pipeline.run.plan import Plan, policy_maker, unique
from pipeline.run.records import Frontier, Records, find_frontier, newest_commit, stale_because
from pipeline.run.superseded import move_aside
from pipeline.run.tasks import PREPARE, Stage, Task, task_key
from pipeline.run.troubles import Trouble, described, note_recovery, note_trouble

ROWS_PATIENCE = 600.0
"""Seconds for which writing the rows of a fully trained run is retried."""
_ROWS_REST = 1.0


class Outcome(StrEnum):
    """How a call of the driver ended."""

    COMPLETE = "complete"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"


class Watcher(Protocol):
    """Callbacks that display progress."""

    def progress(self, frontier: Frontier, records: Records, tasks: tuple[Task, ...]) -> None:
        """Show how far the run has come. Called after every pass."""

    def row(self, row: dict[str, float | int]) -> None:
        """Show a new row of metrics.jsonl."""

    def note(self, text: str) -> None:
        """Show a line that a person wants to read: a retry, a repair."""


@dataclass
class Driver:
    """State of one call or pass: everything in it can be derived again from the disk and the scheduler."""

    run: Run
    jobs: Jobs
    watcher: Watcher
    books: Publisher
    records: Records
    frontier: Frontier
    given_up: tuple[GiveUp, ...] = ()
    advised: set[Rule] = field(default_factory=set)
    """Findings of the metrics that this driver has reported."""
    trouble: str = ""
    """Reason why rows could not be written in the last pass; empty if they could."""
    has_recovered: bool = False
    """Whether the journal holds no unresolved trouble with rows; false until checked, as an earlier driver
    may have left some."""

    @staticmethod
    def of(run: Run, jobs: Jobs, watcher: Watcher, books: Publisher) -> "Driver":
        driver = Driver(run, jobs, watcher, books, Records(run.paths), find_frontier(run.plan, run.paths))
        with never_in_the_way(driver):
            books.open()
        return driver

    @property
    def is_complete(self) -> bool:
        return self.frontier.is_complete(self.run.plan, self.books.newest)

    @property
    def lacks_rows_only(self) -> bool:
        """Whether everything is committed, and only rows are left to be written."""
        return not self.is_complete and self.frontier.is_complete(self.run.plan, self.run.plan.iterations)


def tell_on_the_way(driver: Driver, begun: float) -> None:
    """Notify people of a run that is stalled, or whose rows cannot be written."""
    run, note = driver.run, driver.watcher.note
    tell_if_stalled(run, newest_commit(driver.records), begun, note)
    if driver.trouble:
        tell(run, rows_unwritten(run, driver.trouble, begun), note)


def has_whole_chain(driver: Driver) -> bool:
    """Whether every policy of a run that is at its end was made from the one before it. If not, the first one
    that was not is taken back with everything after it, and the run goes on from there.

    Raises:
        RunError: it cannot be made again: what it would be made from was thinned out.
    """
    run = driver.run
    found = find_break(run.plan, run.paths, driver.frontier.updated)
    if found is None:
        return True
    driver.watcher.note(f"{found.why}; it is moved aside, with all that came of it, and made again")
    driver.books.close_rows()
    take_history_back(run, Point(Stage.UPDATE, found.iteration))
    driver.records, driver.frontier = Records(run.paths), find_frontier(run.plan, run.paths)
    return False


def wait_for_rows(driver: Driver, since: float) -> None:
    """Sleep before rows are tried again: a full disk may have room soon.

    Raises:
        RunError: rows have been waited for since ``since`` (monotonic), longer than ROWS_PATIENCE.
    """
    if time.monotonic() - since > ROWS_PATIENCE:
        raise RunError(
            f"everything is committed, but its rows could not be written for {ROWS_PATIENCE:.0f} s: "
            f"{driver.trouble}; mend that, then: slurm-ppo resume {shlex.quote(str(driver.run.paths.root))}"
        )
    time.sleep(_ROWS_REST)


def advance(driver: Driver) -> Actions:
    """Make one pass: observe the disk and the scheduler, decide, act, and keep books. Idempotent."""
    seen = observe(driver)
    max_attempts = driver.run.config.scheduler.max_attempts
    actions = reconcile(driver.run.plan, seen, max_attempts, in_advance=driver.jobs.horizon > 0)
    act(driver, actions, seen)
    keep_books(driver, seen.tasks)
    driver.watcher.progress(driver.frontier, driver.records, tuple(seen.tasks))
    return actions


def keep_books(driver: Driver, tasks: Sequence[Task]) -> None:
    """Write the rows that are due, remove what is not to be kept, and pack old iterations."""
    books, records, watcher = driver.books, driver.records, driver.watcher
    with never_in_the_way(driver):
        for row in books.write_rows(records, driver.frontier, watcher.note):
            watcher.row(row)
            tell_advice(driver)
        for note in (*books.thin(driver.frontier), *books.pack(driver.frontier)):
            watcher.note(note)
        if not driver.has_recovered:
            note_recovery(driver.run.paths, Trouble.ROWS)
        driver.trouble, driver.has_recovered = "", True
    records.keep_only({*around(driver.run.plan, tasks), *books.wanted(driver.frontier)})


def tell_advice(driver: Driver) -> None:
    """Report findings that the newest row shows for the first time, each once in the life of a driver."""
    for advice in first_shown(Evidence(driver.books.rows, driver.run.config)):
        if advice.rule not in driver.advised:
            driver.watcher.note(in_a_line(advice))
            driver.advised.add(advice.rule)


@contextlib.contextmanager
def never_in_the_way(driver: Driver) -> Iterator[None]:
    """Keep errors of a block that serves people (rows, best policy, trackers) from stopping training: they
    are reported, and the next pass tries again.
    """
    try:
        yield
    except Exception as error:  # whatever it is: training goes on
        text = described(error)
        if text != driver.trouble:
            driver.watcher.note(f"rows cannot be written: {text}; training goes on")
            note_trouble(driver.run.paths, Trouble.ROWS, text)
        driver.trouble, driver.has_recovered = text, False


def observe(driver: Driver) -> Observation:
    """Collect ended jobs and new commits, and find how far the run has come."""
    jobs, records = driver.jobs, driver.records
    jobs.query()
    tasks = look(driver)
    for ended in jobs.collect_ended(tasks, records.published):
        record_failure(driver, ended)
    return Observation(tasks, records.committed(), dict(records.corrupt), jobs.live, jobs.failures)


def look(driver: Driver) -> tuple[Task, ...]:
    """Read new commits and move the frontier along. Returns the window: the tasks to be considered now."""
    plan, records = driver.run.plan, driver.records
    while True:
        tasks = plan.window(driver.frontier.updated, driver.frontier.evaluated, driver.jobs.horizon)
        records.refresh(around(plan, tasks))
        moved = find_moved(driver)
        if moved == driver.frontier:
            break
        if driver.frontier.updated < 0:
            note_rejected(driver)
        driver.frontier = moved
    return tasks


def around(plan: Plan, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Return the tasks and those whose output they read, without repeats."""
    return unique(*tasks, *(source for task in tasks for source in plan.inputs(task)))


def note_rejected(driver: Driver) -> None:
    """Report how many prompts were left out, and where they are listed."""
    record = driver.records.known[PREPARE]
    if count := int(record.metrics.get("rejected", 0)):
        listing = record.output("rejected", "jsonl").path
        where = driver.run.paths.root / listing
        driver.watcher.note(f"{count} prompt rows cannot be used and are left out; listed in {where}")


def find_moved(driver: Driver) -> Frontier:
    """Return the frontier after the commits known now. It does not pass over an update that is stale: one
    whose inputs have changed since is for reconcile to take back.
    """
    plan, known = driver.run.plan, driver.records.known
    updated, evaluated = driver.frontier.updated, driver.frontier.evaluated
    following = policy_maker(updated + 1)
    if updated < 0:
        updated = plan.start if PREPARE in known else updated
    elif updated < plan.iterations and following in known:
        updated += not stale_because(following, plan.inputs(following), known)
    evaluations = plan.evaluation_tasks()
    # Nothing counts before prepare does: when its commit was taken back, others may still stand.
    if updated >= 0 and evaluated < len(evaluations) and evaluations[evaluated] in known:
        evaluated += 1
    return Frontier(updated, evaluated)


def record_failure(driver: Driver, ended: Ended) -> None:
    """Write a failed attempt into the journal, and verify the input that it suspects."""
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
        driver.records.verify(ended.suspect)


def act(driver: Driver, actions: Actions, seen: Observation) -> None:
    """Carry out what was decided. Retracting comes first: a launch must not see what is being taken back."""
    if actions.retract:
        take_back(driver, actions.retract)
    if actions.give_up:
        driver.jobs.give_up(actions.give_up)
        return
    if actions.launch:
        driver.jobs.launch(actions.launch, seen)
    driver.jobs.update_dependencies(seen)


def take_back(driver: Driver, retracts: Sequence[Retract]) -> None:
    """Move the commits to retract aside, and find again how far the run has come."""
    label = task_key(retracts[0].task).replace("/", "-")
    more = f"-and-{len(retracts) - 1}-more" if len(retracts) > 1 else ""
    for iteration in {retract.task.iteration for retract in retracts if retract.task.stage.is_sharded}:
        unpack(driver.run.paths, iteration)
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
