"""The driver's pass: observe, reconcile, act, publish. It may be killed at any moment."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from pipeline.decide.reconcile import Actions, Observation, reconcile
from pipeline.metrics.advice import first_shown, in_a_line
from pipeline.metrics.advice_input import AdviceInput, Rule
from pipeline.metrics.noticed import note_noticed
from pipeline.notify.events import completion, failure, pause, rows_unwritten, tell, tell_if_stalled
from pipeline.orchestrate.jobs import Ended, Jobs
from pipeline.orchestrate.lost_states import find_lost, note_lost_states
from pipeline.orchestrate.publish import Publisher
from pipeline.orchestrate.rewind import Point, take_commits_back
from pipeline.orchestrate.rewind import take_back as take_history_back
from pipeline.run import journal
from pipeline.run.benchmarks import leave_out
from pipeline.run.control import read_control
from pipeline.run.directory import Run, resume_command
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.identity import RunError
from pipeline.run.kept import keep
from pipeline.run.losses import find_break
from pipeline.run.plan import Plan, policy_maker, unique
from pipeline.run.records import (
    Frontier,
    Records,
    find_frontier,
    newest_commit,
    stale_because,
    without_stale,
)
from pipeline.run.tasks import PREPARE, Stage, Task, task_key
from pipeline.run.troubles import Trouble, described, note_recovery, note_trouble
from slurm.sharedfiles import NotAFile

ROWS_PATIENCE = 600.0
"""Seconds for which writing the rows of a fully trained run is retried: a full disk may have room soon."""
BLOCKED_PATIENCE = 20.0
"""The same where something lies in the place of a file or folder, which waiting does not remove."""
_BLOCKED = (NotAFile, FileExistsError, IsADirectoryError, NotADirectoryError)
_ROWS_REST = 1.0
_READ_SECONDS = 30.0
"""Seconds after which a driver that stays reads all that is at hand again: files may be purged meanwhile, and
workers go by what is there."""
_KEPT_SECONDS = 300.0
"""Seconds between two looks of a driver at the files that identify the run."""


class Outcome(StrEnum):
    """End of a run, or of a person's watching it."""

    COMPLETE = "complete"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    """Rest of a run whose jobs were cancelled with Slurm's own commands."""


@dataclass(frozen=True)
class Pass:
    """Result of one pass."""

    outcome: Outcome | None
    """Outcome of the run; None while it goes on."""
    given_up: tuple[Failure, ...] = ()
    """Last failures of the tasks for which the run stops."""
    newest: float = 0.0
    """Unix time of the newest commit that the pass saw; 0 for none."""
    trouble: str = ""
    """Reason why rows could not be written; empty if they could."""
    is_watched: bool = True
    """Whether a next pass is ensured; false where Slurm's queue is full and holds no driver job."""
    is_unsettled: bool = False
    """Whether the caller is to make another pass at once."""


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
    """State of one invocation or pass: all of it can be derived again from the disk and the executor."""

    run: Run
    jobs: Jobs
    watcher: Watcher
    publisher: Publisher
    records: Records = field(init=False)
    frontier: Frontier = field(init=False)
    advised: set[Rule] = field(default_factory=set)
    """Findings of the metrics that this driver has reported."""
    trouble: str = ""
    """Reason why rows could not be written in the last pass; empty if they could."""
    rows_patience: float = ROWS_PATIENCE
    """Seconds for which that reason is waited for to pass, where nothing but rows is left to do."""
    read: float = field(init=False)
    """When everything was last read from the disk (monotonic)."""
    committed: set[Task] = field(default_factory=set)
    """Tasks with a record that the last pass knew."""
    kept: float = -math.inf
    """When it last checked the files that identify the run (monotonic)."""
    has_recovered: bool = False
    """Whether the journal holds no unresolved trouble with rows; false until checked, as an earlier driver
    may have left some."""

    def __post_init__(self) -> None:
        self._read_anew()
        with self.never_in_the_way():
            self.publisher.open()

    def _read_anew(self) -> None:
        self.records = Records(self.run.paths)
        self.frontier = self._find_frontier()
        self.read = time.monotonic()

    def _find_frontier(self) -> Frontier:
        """Return how far the run has come, without evaluations of other policies than there are now."""
        return without_stale(self.run.plan, self.records, find_frontier(self.run.plan, self.run.paths))

    def one_pass(self) -> Actions:
        """Observe the disk and the executor, decide, act, and publish. Idempotent."""
        seen = self.observe()
        config = self.run.config
        attempts = config.scheduler.max_attempts, config.attempts_of(Stage.BENCHMARK)
        actions = reconcile(self.run.plan, seen, *attempts)
        if actions.retract and self.publisher.tidying.finish():
            return self.one_pass()  # what was seen may have gone since
        self.act(actions, seen)
        self.publish(seen.tasks)
        self.watcher.progress(self.frontier, self.records, tuple(seen.tasks))
        return actions

    def observe(self) -> Observation:
        """Collect ended jobs and new commits, and find how far the run has come."""
        if time.monotonic() - self.read > _READ_SECONDS:
            self._read_anew()
        jobs, records = self.jobs, self.records
        jobs.query()
        tasks = self._read_commits()
        newest = policy_maker(self.frontier.updated) if self.frontier.updated > self.run.plan.start else None
        new, self.committed = records.known.keys() - self.committed, set(records.known)
        for ended in jobs.collect_ended(tasks, records.published, newest, new):
            self._record_failure(ended)
        with self.never_in_the_way():
            note_lost_states(self.run, records, self.frontier.updated, jobs.saving, self.watcher.note)
        passed = self.frontier.passed(self.run.plan, tasks)
        known, corrupt = dict(records.known), dict(records.corrupt)
        seen = Observation(tasks, known, corrupt, jobs.live, jobs.failures, passed=passed)
        return replace(seen, lost=find_lost(self.run, seen, records, self.frontier.updated))

    def act(self, actions: Actions, seen: Observation) -> None:
        """Carry out the decisions. Retracting comes first: a launch must not see what is being taken back. A
        run of which something is given up stops, and the caller cancels what waits.
        """
        if actions.retract:
            take_commits_back(self.run, actions.retract, self.records, self.jobs, self.watcher.note)
            self.frontier = self._find_frontier()
        for last in actions.leave_out:
            self._leave_out(last, seen)
        if not actions.give_up:
            self.jobs.launch(actions.launch, seen)

    def publish(self, tasks: Sequence[Task]) -> None:
        """Write the rows that are due, remove what is not to be kept, and pack old iterations."""
        publisher, note = self.publisher, self.watcher.note
        with self.never_in_the_way():
            for row in publisher.write_rows(self.records, self.frontier, note, self.jobs.saving):
                self.watcher.row(row)
                self._tell_advice(int(row["iteration"]))
            for text in publisher.note_benchmarks(self.frontier):
                note(text)
            for text in publisher.tidy(self.frontier):
                note(text)
            self._keep_identity()
            if not self.has_recovered:
                note_recovery(self.run.paths, Trouble.ROWS)
            self.trouble, self.has_recovered = "", True
        self.records.keep_only({*around(self.run.plan, tasks), *publisher.wanted(self.frontier)})

    @contextlib.contextmanager
    def never_in_the_way(self) -> Iterator[None]:
        """Keep errors of a block that serves people (rows, best policy, trackers) from stopping training:
        they are reported, and the next pass tries again.
        """
        try:
            yield
        except Exception as error:  # whatever it is: training goes on
            text = described(error)
            if text != self.trouble:
                self.watcher.note(f"rows cannot be written: {text}; training goes on")
                note_trouble(self.run.paths, Trouble.ROWS, text)
            self.trouble, self.has_recovered = text, False
            self.rows_patience = BLOCKED_PATIENCE if isinstance(error, _BLOCKED) else ROWS_PATIENCE

    @property
    def is_complete(self) -> bool:
        return self.frontier.is_complete(self.run.plan, self.publisher.newest)

    @property
    def writes_state(self) -> bool:
        """Whether an attempt at an update is running: it writes the trainer's state behind its policy."""
        return bool(self.jobs.saving)

    @property
    def lacks_rows_only(self) -> bool:
        """Whether everything is committed, and only rows are left to be written."""
        return not self.is_complete and self.frontier.is_committed(self.run.plan)

    def result_of(self, actions: Actions) -> Pass:
        """Return what came of a pass with these actions. A run is not over while its last update's attempt
        writes the trainer's state: whether that was lost is still to be said."""
        is_over = self.is_complete and not self.writes_state
        outcome = Outcome.COMPLETE if is_over else Outcome.FAILED if actions.give_up else None
        return Pass(outcome, actions.give_up, newest_commit(self.records), self.trouble)

    def has_whole_chain(self) -> bool:
        """Whether every policy of a run that is at its end was made from the one before it. If not, the first
        one that was not is taken back with everything after it, and the run goes on from there.

        Raises:
            RunError: it cannot be made again: what it would be made from was pruned.
        """
        run = self.run
        self.publisher.tidying.finish()
        found = find_break(run.plan, run.paths, self.frontier.updated)
        if found is None:
            return True
        self.watcher.note(f"{found.why}; it is moved aside, with all that came of it, and made again")
        self.publisher.close_rows()
        take_history_back(run, Point(Stage.UPDATE, found.iteration))
        self._read_anew()
        return False

    def wait_for_rows(self, since: float) -> None:
        """Sleep before rows are tried again.

        Raises:
            RunError: rows have been waited for since ``since`` (monotonic), longer than their patience.
        """
        waited = time.monotonic() - since
        if waited > self.rows_patience:
            raise RunError(
                f"everything is committed, but its rows could not be written for {self.rows_patience:.0f} s: "
                f"{self.trouble}; fix that, then: {resume_command(self.run)}"
            )
        if waited < _ROWS_REST:
            self.watcher.note(
                f"only rows are left to be written; tried for {self.rows_patience:.0f} s at most"
            )
        time.sleep(_ROWS_REST)

    def _read_commits(self) -> tuple[Task, ...]:
        """Read new commits and move the frontier along. Returns the window: the tasks to consider now."""
        plan, records = self.run.plan, self.records
        while True:
            tasks = self.frontier.window(plan)
            records.refresh(around(plan, tasks))
            moved = self._find_moved()
            if moved == self.frontier:
                return tasks
            if self.frontier.updated < 0:
                self._note_rejected()
            self.frontier = moved

    def _find_moved(self) -> Frontier:
        """Return the frontier after the commits known now. It does not pass over an update or an evaluation
        that is stale: one whose inputs have changed since is for reconcile to take back.
        """
        plan, known = self.run.plan, self.records.known
        updated, evaluated, benchmarked = astuple(self.frontier)
        following = policy_maker(updated + 1)
        if updated < 0:
            return self._after_prepare() if PREPARE in known else self.frontier
        if updated < plan.iterations and following in known:
            updated += not stale_because(following, plan.inputs(following), known)
        evaluations = plan.evaluation_tasks()
        # Nothing counts before prepare does: when its commit was taken back, others may still stand.
        if updated >= 0 and evaluated < len(evaluations) and (next_one := evaluations[evaluated]) in known:
            is_of_this = not stale_because(next_one, plan.inputs(next_one), known)
            evaluated += next_one.iteration <= updated and is_of_this
        benchmarks = plan.benchmark_tasks()
        if updated >= 0 and benchmarked < len(benchmarks) and benchmarks[benchmarked] in known:
            benchmarked += 1
        return Frontier(updated, evaluated, benchmarked)

    def _after_prepare(self) -> Frontier:
        """Return how far a run has come whose prompts were prepared, perhaps again: then what was made from
        others is for reconcile to take back, from the first iteration on."""
        start = replace(self.frontier, updated=self.run.plan.start)
        found = find_frontier(self.run.plan, self.run.paths)
        newest = policy_maker(found.updated)
        record = self.records.readable(newest)
        if found.updated <= self.run.plan.start or record is None:
            return start
        read = {newest: record, PREPARE: self.records.known[PREPARE]}
        return start if stale_because(newest, [PREPARE], read) else found

    def _note_rejected(self) -> None:
        """Report how many prompts were left out, and where they are listed."""
        record = self.records.known[PREPARE]
        if count := int(record.metrics.get("rejected", 0)):
            where = self.run.paths.root / record.output("rejected", "jsonl").path
            self.watcher.note(f"{count} prompt rows cannot be used and are left out; listed in {where}")

    def _record_failure(self, ended: Ended) -> None:
        """Write a failed attempt into the journal, and verify the input that it suspects."""
        failure = ended.failure
        if failure.kind is FailureKind.CANCELLED:
            return
        journal.event(
            self.run.paths.events,
            "failed",
            task=task_key(failure.task),
            attempt=failure.attempt,
            kind=failure.kind,
            message=failure.message,
            evidence=ended.ending.evidence,
            job=failure.job,
            node=failure.node,
        )
        self.watcher.note(f"{failure.task}, attempt {failure.attempt}: {failure.message}")
        if ended.suspect is not None:
            self.records.verify(ended.suspect)
            if ended.suspect == PREPARE:
                self._look_for_prompts()

    def _look_for_prompts(self) -> None:
        """Find again how far the run has come, where the record of its prompts is gone."""
        if self.records.readable(PREPARE) is None:
            self.frontier = self._find_frontier()

    def _leave_out(self, failure: Failure, seen: Observation) -> None:
        """Commit an expendable task without a result, so that the run goes on without it."""
        task, why = failure.task, failure.message
        if leave_out(self.run.paths, failure, self.run.plan.inputs(task), seen.committed):
            journal.event(self.run.paths.events, "left_out", task=task_key(task), message=why)
            self.watcher.note(f"{task} is left out, its numbers are missing: {why}; training goes on")

    def _keep_identity(self) -> None:
        """Write again what a purge has taken of what identifies the run, and keep the rest from the next."""
        if time.monotonic() - self.kept < _KEPT_SECONDS:
            return
        if gone := keep(self.run):
            journal.event(self.run.paths.events, "identity_kept", files=gone)
            self.watcher.note(
                f"{' and '.join(gone)}: gone or corrupt, and written again from what is kept twice"
            )
        self.kept = time.monotonic()

    def _tell_advice(self, iteration: int) -> None:
        """Report findings that the newest row is the first to show, each once in the life of a driver, and
        keep them for the report."""
        for advice in first_shown(AdviceInput(self.publisher.rows, self.run.config)):
            if advice.rule not in self.advised:
                self.watcher.note(in_a_line(advice))
                self.advised.add(advice.rule)
                note_noticed(self.run.paths, iteration, advice)


def around(plan: Plan, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Return the tasks and those whose output they read, without repeats."""
    return unique(*tasks, *(source for task in tasks for source in plan.inputs(task)))


def tell_of_pass(run: Run, done: Pass, begun: float, note: Callable[[str], None]) -> None:
    """Notify people of what came of a pass: the run's end, or that it is stalled or its rows are not written.
    Interrupted and cancelled runs send nothing.

    Args:
        begun: unix time when the invocation began.
    """
    if done.outcome is Outcome.COMPLETE:
        tell(run, completion(run), note)
    elif done.outcome is Outcome.FAILED:
        tell(run, failure(run, done.given_up, begun), note)
    elif done.outcome is Outcome.PAUSED and (act := read_control(run.paths).paused):
        tell(run, pause(run, act.in_words, begun), note)
    elif done.outcome is None:
        tell_if_stalled(run, done.newest, begun, note)
    if done.trouble:
        tell(run, rows_unwritten(run, done.trouble, begun), note)
