"""Where a run on Slurm stands: its submissions and commits on disk, matched with one look at the queue."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.executors.slurm.queue import Queue, is_live, look_at_queue
from pipeline.run.attempts import AttemptId
from pipeline.run.commits import Record
from pipeline.run.control import Control, read_control
from pipeline.run.directory import Run
from pipeline.run.records import Frontier, Records
from pipeline.run.submissions import Ledger, Submission
from pipeline.run.tasks import PREPARE, Task
from slurm.query import Element
from slurm.states import Phase, SlurmState, phase_of, reason_in_words

_BEHIND_OTHERS = "Priority"
_NO_FAULT = frozenset({SlurmState.COMPLETED, SlurmState.CANCELLED})


@dataclass(frozen=True)
class StageProgress:
    """Progress of one stage of one iteration, or of one pool's scores.

    Shards in none of the four counts were not submitted, or were cancelled.
    """

    iteration: int
    stage: str
    """Name of the stage; a pool's with its name, like ``score-big``."""
    total: int
    done: int
    running: int
    waiting: int
    failed: int
    """Shards whose last attempt ended without a commit, and that no attempt is queued for."""
    reason: str | None
    """Reason why most of the waiting shards wait, in words."""
    queue_seconds: float | None
    """Longest time that a shard waited once its inputs were there, or has waited so far."""
    run_seconds: float | None
    """Seconds from the first start to the last end, or until now."""
    attempts: int
    """Starts that were requested: elements submitted, and requeues."""
    resubmitted: int
    requeued: int
    jobs: tuple[str, ...]
    """Ids of the arrays in the queue."""
    nodes: tuple[str, ...]
    """Nodes that it runs on."""


@dataclass(frozen=True)
class DriverJob:
    """A job in the queue that will advance the run."""

    job: str
    iteration: int
    """Iteration that it follows; 0 if it starts at a set time, whatever happens."""
    is_running: bool
    reason: str | None


@dataclass(frozen=True)
class SlurmStatus:
    """State of a run's jobs."""

    unanswered: str | None
    """Slurm's error where it did not answer: then nothing is known of the queue."""
    jobs_running: int
    jobs_waiting: int
    stages: tuple[StageProgress, ...]
    """Stages of the iterations at hand."""
    drivers: tuple[DriverJob, ...]
    finish: float | None
    """Unix time at which the run will be complete at the recent pace."""


@dataclass(frozen=True)
class TaskFacts:
    """Commit, array element and submissions of one task."""

    task: Task
    record: Record | None
    element: Element | None
    """Array element in the queue: the live one, else one that ended and is still shown."""
    submissions: tuple[Submission, ...]
    """Submissions it was part of, oldest first."""
    ready: float | None
    """Unix time at which its last input was committed; None while one is missing."""

    @property
    def is_running(self) -> bool:
        return self._phase is Phase.RUNNING

    @property
    def is_waiting(self) -> bool:
        return self._phase is Phase.PENDING

    @property
    def _phase(self) -> Phase | None:
        return None if self.record or self.element is None else phase_of(self.element.state)

    @property
    def has_failed(self) -> bool:
        if self.record or not self.submissions or self.is_running or self.is_waiting:
            return False
        is_noted = self.submissions[-1].has_ended(self.task)
        return is_noted or (self.element is not None and self.element.state not in _NO_FAULT)

    @property
    def started(self) -> float | None:
        if self.record:
            return self.record.started
        return self.element.started if self.is_running and self.element else None

    @property
    def requeues(self) -> int:
        if self.record:
            return AttemptId.parse(self.record.attempt).restart
        return (self.element.restarts or 0) if self.element else 0

    def queue_seconds(self, now: float) -> float | None:
        """Return the seconds waited since its inputs were there and it was submitted, or requeued."""
        if self.ready is None or not self.submissions or not (self.started or self.is_waiting):
            return None
        since = [self.ready, self.submissions[-1].created]
        if self.element and not self.record and self.element.restarts:
            since.append(self.element.submitted or 0.0)
        return max(0.0, (self.started or now) - max(since))


def read_slurm_status(
    run: Run, frontier: Frontier, last_row: Mapping[str, float] | None, records: Records
) -> SlurmStatus:
    """Call squeue once, and read the folders of the iterations at hand.

    Args:
        records: cache of commit records; those that are read are added.
    """
    queue = look_at_queue(run)
    tasks = tasks_at_hand(run, frontier)
    submissions = Ledger(run.paths).load({task.iteration for task in tasks} | {0})
    now = time.time()
    facts = gather(run, tasks, submissions, queue, records)
    running = sum(phase_of(element.state) is Phase.RUNNING for element in queue.live)
    return SlurmStatus(
        unanswered=queue.unanswered,
        jobs_running=running,
        jobs_waiting=len(queue.live) - running,
        stages=tuple(stages_of(facts, now)),
        drivers=tuple(drivers_of(submissions, queue)),
        finish=finish_of(run.identity.created, last_row) if queue.live else None,
    )


def state_of(is_complete: bool, control: Control, status: SlurmStatus) -> str:
    """Return complete, cancelled, failed, running, stopped, or unknown where Slurm does not answer."""
    if is_complete:
        return "complete"
    if control.cancelled or control.has_failed:
        return "cancelled" if control.cancelled else "failed"
    if status.unanswered:
        return "unknown"
    return "running" if status.jobs_running + status.jobs_waiting else "stopped"


def read_state(run: Run, is_complete: bool, status: SlurmStatus) -> str:
    return state_of(is_complete, read_control(run.paths), status)


def tasks_at_hand(run: Run, frontier: Frontier) -> list[Task]:
    """Return every task of the iterations that may be in the queue, done or not."""
    horizon = max(1, getattr(run.config.scheduler, "horizon", 1))
    window = run.plan.window(frontier.updated, frontier.evaluated, horizon)
    first = [PREPARE] if frontier.updated < 0 else []
    return list(dict.fromkeys([*first, *window]))


def gather(
    run: Run,
    tasks: Sequence[Task],
    submissions: Sequence[Submission],
    queue: Queue,
    records: Records | None = None,
) -> list[TaskFacts]:
    """Match tasks with commits, submissions and elements of the queue.

    Args:
        records: those that an earlier look has read; new ones are added.
    """
    plan = run.plan
    inputs = {task: plan.inputs(task) for task in tasks}
    records = Records(run.paths) if records is None else records
    records.refresh([*tasks, *(source for sources in inputs.values() for source in sources)])
    of_task: dict[Task, list[Submission]] = {}
    for submission in submissions:
        for _, task in submission.tasks():
            of_task.setdefault(task, []).append(submission)
    elements = match(submissions, queue)
    return [
        TaskFacts(
            task,
            records.known.get(task),
            elements.get(task),
            tuple(of_task.get(task, ())),
            _ready(inputs[task], records),
        )
        for task in tasks
    ]


def match(submissions: Sequence[Submission], queue: Queue) -> dict[Task, Element]:
    """Find the element of each task: of several the live one, else the newest."""
    by_name = {submission.name: submission for submission in submissions if submission.is_of_stage}
    found: dict[Task, Element] = {}
    for element in sorted(queue.elements, key=lambda e: (is_live(e), e.submitted or 0.0)):
        if submission := by_name.get(element.name):
            found[submission.task(element.index)] = element
    return found


def _ready(sources: Sequence[Task], records: Records) -> float | None:
    ended = [records.known[source].ended for source in sources if source in records.known]
    return max(ended, default=0.0) if len(ended) == len(sources) else None


def stages_of(facts: Sequence[TaskFacts], now: float) -> Iterator[StageProgress]:
    """Yield the progress of each stage (and pool) of each iteration, in the order of the plan. Pure."""
    groups: dict[tuple[int, str], list[TaskFacts]] = {}
    for fact in facts:
        groups.setdefault((fact.task.iteration, fact.task.job_kind), []).append(fact)
    for (iteration, stage), group in groups.items():
        yield progress_of(iteration, stage, group, now)


def progress_of(iteration: int, stage: str, facts: Sequence[TaskFacts], now: float) -> StageProgress:
    waiting = [f.element for f in facts if f.is_waiting and f.element]
    running = [f.element for f in facts if f.is_running and f.element]
    waits = [seconds for f in facts if (seconds := f.queue_seconds(now)) is not None]
    resubmitted = sum(max(0, len(f.submissions) - 1) for f in facts)
    requeued = sum(f.requeues for f in facts)
    return StageProgress(
        iteration=iteration,
        stage=stage,
        total=len(facts),
        done=sum(f.record is not None for f in facts),
        running=len(running),
        waiting=len(waiting),
        failed=sum(f.has_failed for f in facts),
        reason=_reason_of_most(waiting),
        queue_seconds=max(waits, default=None),
        run_seconds=_run_seconds(facts, now),
        attempts=sum(len(f.submissions) for f in facts) + requeued,
        resubmitted=resubmitted,
        requeued=requeued,
        jobs=tuple(dict.fromkeys(e.array_id for e in (*running, *waiting))),
        nodes=tuple(dict.fromkeys(e.node for e in running if e.node)),
    )


def _reason_of_most(waiting: Sequence[Element]) -> str | None:
    """Return the commonest reason for waiting, in words.

    Slurm says Priority of elements behind others of their own; then the others' reason counts.
    """
    reasons = [element.reason for element in waiting]
    counts = Counter([reason for reason in reasons if reason.strip("()") != _BEHIND_OTHERS] or reasons)
    return reason_in_words(counts.most_common(1)[0][0]) if counts else None


def _run_seconds(facts: Sequence[TaskFacts], now: float) -> float | None:
    starts = [f.started for f in facts if f.started is not None]
    if not starts:
        return None
    ends = [f.record.ended for f in facts if f.record]
    is_running = any(f.is_running for f in facts)
    return max(0.0, (now if is_running else max(ends)) - min(starts))


def drivers_of(submissions: Sequence[Submission], queue: Queue) -> Iterator[DriverJob]:
    """Yield the driver jobs in the queue."""
    by_name = {s.name: s for s in submissions if not s.is_of_stage}
    for element in queue.live:
        if submission := by_name.get(element.name):
            is_running = phase_of(element.state) is Phase.RUNNING
            reason = None if is_running else reason_in_words(element.reason)
            yield DriverJob(element.array_id, submission.iteration, is_running, reason)


def finish_of(created: float, last_row: Mapping[str, float] | None) -> float | None:
    """Extrapolate from the last row's pace, to unix time. A time in the past says that the run is late."""
    if last_row is None or not {"seconds/elapsed", "seconds/remaining"} <= last_row.keys():
        return None
    return created + last_row["seconds/elapsed"] + last_row["seconds/remaining"]
