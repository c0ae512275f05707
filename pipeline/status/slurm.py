"""Where a run on Slurm stands: its submissions and commits on disk, matched with one look at the queue."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.config.job_kinds import GUARD
from pipeline.executors.slurm.queue import Queue, is_live, worker_of
from pipeline.run.attempts import AttemptId
from pipeline.run.commits import Record
from pipeline.run.control import Control
from pipeline.run.endings import Ending, Endings
from pipeline.run.plan import Plan
from pipeline.run.submissions import Submission
from pipeline.run.tasks import Task
from pipeline.status.lanes import StageProgress, TaskState
from pipeline.status.trainer_state import Writer
from pipeline.status.whose import Whose
from slurm.query import Element
from slurm.reasons import reason_in_words
from slurm.states import Phase, SlurmState, phase_of

_NO_FAULT = frozenset({SlurmState.COMPLETED, SlurmState.CANCELLED})


@dataclass(frozen=True)
class DriverJob:
    """A job in the queue that will advance the run."""

    job: str
    iteration: int
    """Iteration that it follows; 0 if it follows none."""
    is_running: bool
    reason: str | None
    is_timed: bool = True
    """Whether, if it follows no iteration, it starts at a set time, whatever happens; else when jobs end."""


@dataclass(frozen=True)
class SlurmStatus:
    """State of a run's jobs."""

    unanswered: str | None
    """Slurm's error where it did not answer: then the queue is as it was last seen, if ever."""
    jobs_running: int
    jobs_waiting: int
    stages: tuple[StageProgress, ...]
    """Stages of the iterations at hand."""
    drivers: tuple[DriverJob, ...]
    finish: float | None
    """Unix time at which the run will be complete at the recent pace."""
    whose: Whose | None = None
    """Whose jobs they are, with the last signs of life, where another user looks, or from another cluster;
    None for one's own."""


def state_of(is_complete: bool, control: Control, queue: Queue | None) -> str:
    """Return complete, paused, cancelled, failed, running, stopped, or unknown where Slurm did not answer
    (yet), or does not show the jobs of somebody else."""
    if is_complete:
        return "complete"
    if control.cancelled or control.has_failed:
        return "paused" if control.paused else "cancelled" if control.cancelled else "failed"
    if queue is None or queue.unanswered or queue.is_hidden:
        return "unknown"
    return "running" if queue.live else "stopped"


def task_states(
    plan: Plan,
    tasks: Sequence[Task],
    submissions: Sequence[Submission],
    endings: Endings,
    queue: Queue,
    records: Mapping[Task, Record],
    now: float,
) -> Iterator[TaskState]:
    """Match tasks with commits, submissions, ended attempts and elements of the queue. Pure."""
    of_task: dict[Task, list[Submission]] = {}
    for submission in submissions:
        for _, task in submission.tasks():
            of_task.setdefault(task, []).append(submission)
    elements = match(submissions, queue)
    for task in tasks:
        ready = ready_since(plan, task, records)
        tried = of_task.get(task, ())
        last = endings.of_element(tried[-1], tried[-1].index_of(task)) if tried else None
        yield task_state(task, records.get(task), elements.get(task), tried, last, ready, now)


def ready_since(plan: Plan, task: Task, records: Mapping[Task, Record]) -> float | None:
    """Return the unix time at which a task's last input was committed; None while one is missing."""
    sources = plan.inputs(task)
    ended = [records[source].ended for source in sources if source in records]
    return max(ended, default=0.0) if len(ended) == len(sources) else None


def task_state(
    task: Task,
    record: Record | None,
    element: Element | None,
    submissions: Sequence[Submission],
    ending: Ending | None,
    ready: float | None,
    now: float,
) -> TaskState:
    """Determine one task's state. Pure.

    Args:
        element: array element in the queue: the live one, else one that ended and is still shown.
        submissions: those that the task was part of, oldest first.
        ending: how the attempt by the last of them ended, where that is judged.
        ready: unix time at which its last input was committed; None while one is missing.
    """
    seen = None if record else element
    phase = phase_of(seen.state) if seen else None
    is_running, is_waiting = phase is Phase.RUNNING, phase is Phase.PENDING
    requeues = AttemptId.parse(record.attempt).restart if record else (seen.restarts or 0) if seen else 0
    started = record.started if record else seen.started if seen and is_running else None
    has_failed, waited = False, None
    if submissions and not record and not is_running and not is_waiting:
        has_failed = ending.is_failure if ending else bool(seen and seen.state not in _NO_FAULT)
    if submissions and ready is not None and (started or is_waiting):
        requeued = (seen.submitted or 0.0) if seen and requeues else 0.0
        waited = max(0.0, (started or now) - max(ready, submissions[-1].created, requeued))
    return TaskState(
        task=task,
        record=record,
        is_running=is_running,
        is_waiting=is_waiting,
        has_failed=has_failed,
        attempts=len(submissions),
        requeues=requeues,
        started=started,
        waited=waited,
        element=seen,
    )


def match(submissions: Sequence[Submission], queue: Queue) -> dict[Task, Element]:
    """Find the element of each task: of several the live one, else the newest."""
    by_name = {submission.name: submission for submission in submissions if submission.is_of_stage}
    found: dict[Task, Element] = {}
    for element in sorted(queue.elements, key=lambda e: (is_live(e), e.submitted or 0.0)):
        if submission := by_name.get(element.name):
            found[submission.task(element.index)] = element
    return found


def running_workers(queue: Queue) -> frozenset[str]:
    """Return the names that workers of the jobs that run have (:mod:`pipeline.workers.beats`)."""
    return frozenset(running_elements(queue))


def running_elements(queue: Queue) -> dict[str, Element]:
    """Return the elements that run, by the names that they have as workers."""
    return {str(worker_of(e)): e for e in queue.live if phase_of(e.state) is Phase.RUNNING}


def drivers_of(submissions: Sequence[Submission], queue: Queue) -> Iterator[DriverJob]:
    """Yield the driver jobs in the queue."""
    by_name = {s.name: s for s in submissions if not s.is_of_stage}
    for element in queue.live:
        if submission := by_name.get(element.name):
            is_running = phase_of(element.state) is Phase.RUNNING
            reason = None if is_running else reason_in_words(element.reason)
            is_timed = submission.job_kind == GUARD
            yield DriverJob(element.array_id, submission.iteration, is_running, reason, is_timed)


def writer_of(update: Record, submissions: Sequence[Submission], queue: Queue, asked: float | None) -> Writer:
    """Find the attempt that committed an update and goes on to write the trainer's state. Pure.

    Args:
        submissions: those of the update's iteration among them.
        asked: unix time at which Slurm answered, None: it has not; what was committed later may not be in it.
    """
    element = match(submissions, queue).get(update.task)
    if element is not None and is_live(element):
        attempt = AttemptId.parse(update.attempt)
        # One that was requeued finds the commit, and ends.
        is_same = (attempt.job, attempt.restart) == (element.array_id, element.restarts or 0)
        is_running = is_same and phase_of(element.state) is Phase.RUNNING
        place = f" on {element.node}" if element.node else ""
        return Writer(is_running, f"job {element.array_id}_{element.index}{place}")
    return Writer(False if asked is not None and asked > update.ended else None)
