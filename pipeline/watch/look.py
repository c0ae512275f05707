"""One look at a run: what the live view shows, as a value. It costs the same however long the run is."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pipeline.config.scheduler import SlurmConfig
from pipeline.executors.slurm.queue import Queue
from pipeline.metrics.advice import Advice, Evidence, advise
from pipeline.metrics.terminal import Row
from pipeline.run import journal
from pipeline.run.directory import Run
from pipeline.run.journal import ROWS_BYTES
from pipeline.run.lease import holder_of
from pipeline.run.records import Frontier, Records, find_frontier, newest_row
from pipeline.run.submissions import Ledger
from pipeline.run.tasks import Task
from pipeline.status.slurm import (
    DriverJob,
    SlurmStatus,
    StageProgress,
    TaskFacts,
    drivers_of,
    finish_of,
    gather,
    progress_of,
    read_state,
    tasks_at_hand,
)
from pipeline.status.snapshot import machine_state
from pipeline.watch.localtasks import LocalTask, local_tasks
from slurm.sharedfiles import persistently
from slurm.states import Phase, phase_of

_TAKEN_BACK = ("retracted", "went_back")
"""Events after which a commit that was read before may be gone."""
_EVENTS_BYTES = 1 << 18


class ShardState(StrEnum):
    """State of one task."""

    DONE = "done"
    RUNNING = "running"
    AGAIN = "again"
    """Another attempt than the first, running or waiting."""
    WAITING = "waiting"
    FAILED = "failed"
    """Last attempt ended without a commit, and none is queued."""
    IDLE = "idle"
    """Task not submitted yet."""


@dataclass(frozen=True)
class Lane:
    """A stage of an iteration, or one pool's scores."""

    progress: StageProgress
    shards: tuple[ShardState, ...]

    @property
    def key(self) -> tuple[int, str]:
        return self.progress.iteration, self.progress.stage


@dataclass(frozen=True)
class SlurmLook:
    """State of the queue at Slurm's last answer."""

    answered: float | None
    """Unix time of Slurm's last answer; None: it was not asked yet, or never answered."""
    unanswered: str | None
    """Slurm's error where it does not answer now: then the rest is from its last answer."""
    jobs_running: int
    jobs_waiting: int
    drivers: tuple[DriverJob, ...]


@dataclass(frozen=True)
class Look:
    """State of a run at one moment."""

    time: float
    run: str
    state: str
    """State as in :attr:`pipeline.status.snapshot.Status.state`."""
    created: float
    iterations_done: int
    iterations: int
    evaluations_done: int
    evaluations: int
    lanes: tuple[Lane, ...]
    rows: tuple[Row, ...]
    """The newest rows of metrics.jsonl."""
    events: tuple[Mapping[str, Any], ...]
    """The newest events of events.jsonl."""
    finish: float | None
    advice: tuple[Advice, ...]
    driver: str | None
    """Driver of a run of this machine, in words."""
    slurm: SlurmLook | None

    @property
    def has_ended(self) -> bool:
        return self.state not in ("running", "unknown")


@dataclass
class Tail:
    """The rows at the end of a journal, read again only when it has changed."""

    path: Path
    num_bytes: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    _seen: tuple[int, int] | None = None

    def refresh(self) -> bool:
        """Reload the rows if the file has changed. Returns whether it has."""
        try:
            status = persistently(self.path, self.path.stat)
            seen = (status.st_size, status.st_mtime_ns)
        except FileNotFoundError:
            seen = (0, 0)
        if seen == self._seen:
            return False
        self.rows = journal.read_tail(self.path, self.num_bytes)
        self._seen = seen
        return True


@dataclass
class SnapshotReader:
    """Maker of looks, which remembers what cannot have changed."""

    run: Run
    clock: Callable[[], float] = time.time
    _records: Records = field(init=False)
    _rows: Tail = field(init=False)
    _events: Tail = field(init=False)
    _advice: tuple[Advice, ...] = ()
    _taken_back: float = 0.0
    _frontier: Frontier | None = None

    def __post_init__(self) -> None:
        self._records = Records(self.run.paths)
        self._rows = Tail(self.run.paths.metrics, ROWS_BYTES)
        self._events = Tail(self.run.paths.events, _EVENTS_BYTES)

    def look(self, queue: Queue | None = None, answered: float | None = None) -> Look:
        """Read what is on disk now.

        Args:
            queue: what Slurm showed last; None: it has not been asked yet, or there is no Slurm.
            answered: when that was, unix time.
        """
        run, now = self.run, self.clock()
        self._refresh()
        frontier = find_frontier(run.plan, run.paths)
        tasks = tasks_at_hand(run, frontier)
        self._forget_what_is_over(frontier, tasks)
        blank = self._blank(frontier, now)
        if isinstance(run.config.scheduler, SlurmConfig):
            return self._on_slurm(blank, tasks, queue, answered)
        return self._on_this_machine(blank, tasks)

    def _refresh(self) -> None:
        if self._events.refresh():
            newest = max((e["time"] for e in self._events.rows if e.get("event") in _TAKEN_BACK), default=0.0)
            if newest != self._taken_back:
                self._records, self._taken_back = Records(self.run.paths), newest
        if self._rows.refresh():
            self._advice = tuple(advise(Evidence(self._rows.rows, self.run.config)))

    def _blank(self, frontier: Frontier, now: float) -> Look:
        """Fill in all that is the same wherever tasks run."""
        plan = self.run.plan
        evaluations = len(plan.evaluations())
        is_complete = frontier.is_complete(plan, newest_row(self._rows.rows, plan.start))
        return Look(
            time=now,
            run=str(self.run.paths.root),
            state="complete" if is_complete else "unknown",
            created=self.run.identity.created,
            iterations_done=max(frontier.updated, plan.start),
            iterations=plan.iterations,
            evaluations_done=frontier.evaluated,
            evaluations=evaluations,
            lanes=(),
            rows=tuple(self._rows.rows),
            events=tuple(self._events.rows),
            finish=None,
            advice=self._advice,
            driver=None,
            slurm=None,
        )

    def _on_slurm(
        self, blank: Look, tasks: Sequence[Task], queue: Queue | None, answered: float | None
    ) -> Look:
        run, shown = self.run, queue or Queue()
        submissions = Ledger(run.paths).load({task.iteration for task in tasks} | {0})
        facts = gather(run, tasks, submissions, shown, self._records)
        running = sum(phase_of(element.state) is Phase.RUNNING for element in shown.live)
        waiting, drivers = len(shown.live) - running, tuple(drivers_of(submissions, shown))
        unasked = "not asked yet" if queue is None else None
        status = SlurmStatus(shown.unanswered or unasked, running, waiting, (), drivers, None)
        state = read_state(run, blank.state == "complete", status)
        return replace(
            blank,
            state=state,
            lanes=tuple(lanes_of(facts, blank.time)),
            finish=self._finish() if shown.live else None,
            slurm=SlurmLook(answered, shown.unanswered, running, waiting, drivers),
        )

    def _on_this_machine(self, blank: Look, tasks: Sequence[Task]) -> Look:
        holder = holder_of(self.run.paths.locks)
        self._records.refresh(tasks)
        found = local_tasks(self.run.paths, tasks, self._records.known, self._events.rows, holder is not None)
        state = machine_state(blank.state == "complete", holder, self._events.rows)
        finish = self._finish() if state == "running" else None
        lanes = tuple(local_lanes(found, blank.time))
        return replace(blank, state=state, lanes=lanes, finish=finish, driver=holder)

    def _finish(self) -> float | None:
        last = next((row for row in reversed(self._rows.rows) if "seconds/remaining" in row), None)
        return finish_of(self.run.identity.created, last)

    def _forget_what_is_over(self, frontier: Frontier, tasks: Sequence[Task]) -> None:
        if frontier != self._frontier:
            plan = self.run.plan
            self._records.keep_only({*tasks, *(source for task in tasks for source in plan.inputs(task))})
            self._frontier = frontier


def shard_state(fact: TaskFacts) -> ShardState:
    """Determine the state of a task on Slurm. Pure."""
    if fact.record:
        return ShardState.DONE
    if fact.is_running or fact.is_waiting:
        if len(fact.submissions) > 1 or fact.requeues:
            return ShardState.AGAIN
        return ShardState.RUNNING if fact.is_running else ShardState.WAITING
    return ShardState.FAILED if fact.has_failed else ShardState.IDLE


def lanes_of(facts: Sequence[TaskFacts], now: float) -> list[Lane]:
    """Make a lane for each stage (and pool) of each iteration, in the order of the plan. Pure."""
    groups: dict[tuple[int, str], list[TaskFacts]] = {}
    for fact in facts:
        groups.setdefault((fact.task.iteration, fact.task.job_kind), []).append(fact)
    return [
        Lane(progress_of(iteration, stage, group, now), tuple(map(shard_state, group)))
        for (iteration, stage), group in groups.items()
    ]


def local_lanes(tasks: Sequence[LocalTask], now: float) -> list[Lane]:
    """Make the lanes of tasks that are processes of one machine. Pure."""
    groups: dict[tuple[int, str], list[LocalTask]] = {}
    for task in tasks:
        groups.setdefault((task.task.iteration, task.task.job_kind), []).append(task)
    return [local_lane(iteration, stage, group, now) for (iteration, stage), group in groups.items()]


def local_lane(iteration: int, stage: str, tasks: Sequence[LocalTask], now: float) -> Lane:
    states = tuple(map(local_state, tasks))
    starts = [task.started for task in tasks if task.started is not None]
    is_running = any(task.is_running for task in tasks)
    end = now if is_running else max((task.ended for task in tasks if task.ended is not None), default=None)
    progress = StageProgress(
        iteration=iteration,
        stage=stage,
        total=len(tasks),
        done=states.count(ShardState.DONE),
        running=sum(task.is_running for task in tasks),
        waiting=sum(task.is_waiting for task in tasks),
        failed=states.count(ShardState.FAILED),
        reason=None,
        queue_seconds=None,
        run_seconds=max(0.0, end - min(starts)) if starts and end is not None else None,
        attempts=sum(task.attempts for task in tasks),
        resubmitted=sum(max(0, task.attempts - 1) for task in tasks),
        requeued=0,
        jobs=(),
        nodes=(),
    )
    return Lane(progress, states)


def local_state(task: LocalTask) -> ShardState:
    if task.is_done:
        return ShardState.DONE
    if task.is_running or task.is_waiting:
        if task.attempts > 1:
            return ShardState.AGAIN
        return ShardState.RUNNING if task.is_running else ShardState.WAITING
    return ShardState.FAILED if task.has_failed else ShardState.IDLE
