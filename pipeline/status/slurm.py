"""Where a run on Slurm stands: its submissions on disk, matched with one look at the queue."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.config.job_kinds import GUARD
from pipeline.executors.slurm.queue import Queue, is_live, worker_of
from pipeline.run.commits import Record
from pipeline.run.control import Control
from pipeline.run.plan import Plan
from pipeline.run.submissions import Submission
from pipeline.run.tasks import Task
from pipeline.status.lanes import StageProgress
from pipeline.status.whose import Whose
from slurm.query import Element
from slurm.reasons import reason_in_words
from slurm.states import Phase, phase_of


@dataclass(frozen=True)
class DriverJob:
    """A job in the queue that will advance the run."""

    job: str
    is_running: bool
    reason: str | None
    is_timed: bool = True
    """Whether it starts at a set time, whatever happens; else when jobs end."""


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


def ready_since(plan: Plan, task: Task, records: Mapping[Task, Record]) -> float | None:
    """Return the unix time at which a task's last input was committed; None while one is missing."""
    sources = plan.inputs(task)
    ended = [records[source].ended for source in sources if source in records]
    return max(ended, default=0.0) if len(ended) == len(sources) else None


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
            yield DriverJob(element.array_id, is_running, reason, is_timed)
