"""Where a run on Slurm stands, by submissions, workers' words and one look at the queue. Pure."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config.job_kinds import DRIVERS, GUARD
from pipeline.config.scheduler import SlurmConfig
from pipeline.decide.elements import most_elements
from pipeline.executors.slurm.fullness import standing_refusal
from pipeline.executors.slurm.queue import RunQueue, is_live
from pipeline.run.commits import Record
from pipeline.run.endings import NO_ENDINGS, Endings
from pipeline.run.plan import Plan
from pipeline.run.submissions import Submission, job_kind_of
from pipeline.run.tasks import Task, parse_task
from pipeline.status.lanes import StageProgress, TaskState
from pipeline.status.trainer_state import Writer
from pipeline.status.whose import Whose
from pipeline.workers.beats import Beat, Doing
from pipeline.workers.summary import WorkersOf
from slurm.limits import ClusterLimits
from slurm.query import Element
from slurm.reasons import reason_in_words
from slurm.states import Phase, phase_of

_MOMENT = 10.0
"""Seconds that a pass and Slurm may take to start a task whose input has just come."""


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


def ready_since(plan: Plan, task: Task, records: Mapping[Task, Record]) -> float | None:
    """Return the unix time at which a task's last input was committed; None while one is missing."""
    sources = plan.inputs(task)
    ended = [records[source].ended for source in sources if source in records]
    return max(ended, default=0.0) if len(ended) == len(sources) else None


def match(submissions: Sequence[Submission], queue: RunQueue) -> dict[Task, Element]:
    """Find the element of each task: of several the live one, else the newest."""
    by_name = {submission.name: submission for submission in submissions if submission.is_of_stage}
    found: dict[Task, Element] = {}
    for element in sorted(queue.elements, key=lambda e: (is_live(e), e.submitted or 0.0)):
        if submission := by_name.get(element.name):
            found[submission.task(element.index)] = element
    return found


def running_workers(queue: RunQueue) -> frozenset[str]:
    """Return the names that workers of the jobs that run have (:mod:`pipeline.workers.beats`)."""
    return frozenset(running_elements(queue))


def running_elements(queue: RunQueue) -> dict[str, Element]:
    """Return the elements that run, by the names that they have as workers."""
    return {e.run_id: e for e in queue.live if phase_of(e.state) is Phase.RUNNING}


def drivers_of(submissions: Sequence[Submission], queue: RunQueue) -> Iterator[DriverJob]:
    """Yield the driver jobs in the queue."""
    by_name = {s.name: s for s in submissions if not s.is_of_stage}
    for element in queue.live:
        if submission := by_name.get(element.name):
            is_running = phase_of(element.state) is Phase.RUNNING
            reason = None if is_running else reason_in_words(element.reason)
            is_timed = submission.job_kind == GUARD
            yield DriverJob(element.array_id, is_running, reason, is_timed)


# --- tasks: workers take them as they come, and say in beats which ---


@dataclass(frozen=True)
class JobsShown:
    """Jobs of a run: those that the queue shows, what they were submitted for, what they say."""

    submissions: Sequence[Submission]
    queue: RunQueue
    beats: Sequence[Beat]
    endings: Endings = NO_ENDINGS
    """How attempts at the tasks at hand ended."""
    begun: float = 0.0
    """Unix time at which a person last submitted the run."""
    at_work: Mapping[Task, tuple[Element, Beat]] = field(init=False)
    """Tasks that jobs do which run."""
    writing: Mapping[str, Element] = field(init=False)
    """Jobs that write the state of an update beside what they do, by the id of the attempt that made it."""
    beginning: Mapping[Task, Element] = field(init=False)
    """Tasks that jobs were submitted for which wait in the queue, or start up."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "at_work", dict(_at_work(self.queue, self.beats)))
        running = running_elements(self.queue)
        writers = (beat for beat in self.beats if beat.saving and beat.worker in running)
        writing = {beat.saving_attempt: running[beat.worker] for beat in writers}
        object.__setattr__(self, "writing", writing)
        object.__setattr__(self, "beginning", _beginning(self.submissions, self.queue, self.beats))

    @property
    def failed(self) -> Iterator[Task]:
        """Tasks of the attempts that failed, each as often as it has some."""
        yield from (parse_task(ending.task) for ending in self.endings.values() if ending.is_failure)

    @property
    def live(self) -> set[Task]:
        """Tasks with a worker at them, or with a submitted one that has not begun."""
        return {*self.at_work, *self.beginning}


def _at_work(queue: RunQueue, beats: Iterable[Beat]) -> Iterator[tuple[Task, tuple[Element, Beat]]]:
    running = running_elements(queue)
    for beat in beats:
        if beat.doing is Doing.BUSY and beat.worker in running:
            try:
                yield parse_task(beat.task), (running[beat.worker], beat)
            except ValueError:  # another version's
                continue


def _beginning(
    submissions: Sequence[Submission], queue: RunQueue, beats: Iterable[Beat]
) -> dict[Task, Element]:
    moved_on = {beat.worker for beat in beats if beat.doing is not Doing.STARTING}
    begins = {(s.name, index): s.begin_of(index) for s in submissions for index in s.indices}
    live = (e for e in queue.elements if is_live(e) and e.run_id not in moved_on)
    shown = [_with_reason(element, begins.get((element.name, element.index))) for element in live]
    return match(submissions, RunQueue(shown))


def _with_reason(element: Element, begins: float | None) -> Element:
    """Say of one that was submitted early why it waits: Slurm's word for that means other waits too."""
    if begins is None or element.reason.strip("()") != "BeginTime":
        return element
    moment = time.strftime("%H:%M:%S", time.localtime(begins))
    return replace(element, reason=f"starts at {moment}, shortly before its input is expected")


def task_states(
    plan: Plan, tasks: Sequence[Task], crew: JobsShown, records: Mapping[Task, Record], now: float
) -> Iterator[TaskState]:
    """Determine the tasks' states."""
    failures = Counter(crew.failed)
    for task in tasks:
        ready = ready_since(plan, task, records)
        yield _state(task, crew, records.get(task), failures[task], ready, now)


def _state(
    task: Task, crew: JobsShown, record: Record | None, failures: int, ready: float | None, now: float
) -> TaskState:
    """Determine one task's state.

    Args:
        failures: its attempts that came to nothing.
        ready: unix time at which its last input was committed; None while one is missing.
    """
    element, beat = (None, None) if record else crew.at_work.get(task, (crew.beginning.get(task), None))
    phase = phase_of(element.state) if element else None
    # One that starts up early is not at the task yet.
    is_running, is_waiting = phase is Phase.RUNNING and ready is not None, phase is Phase.PENDING
    begun = beat.since if beat else element.started if element and is_running else None
    started, waited = record.started if record else begun, None
    if ready is not None and (started or is_waiting):
        waited = max(0.0, (started or now) - max(ready, crew.begun))
    return TaskState(
        task=task,
        record=record,
        is_running=is_running,
        is_waiting=is_waiting,
        has_failed=failures > 0 and not (record or element),
        attempts=failures + bool(record or element),
        started=started,
        waited=waited,
        element=element,
    )


def writer_of(update: Record, crew: JobsShown, asked: float | None) -> Writer:
    """Find the attempt that committed an update and goes on to write the trainer's state.

    Args:
        asked: unix time at which Slurm answered, None: it has not; what was committed later may not be in it.
    """
    element, beat = crew.at_work.get(update.task, (None, None))
    if beat is None or beat.attempt != update.attempt:
        element = crew.writing.get(update.attempt)
    if element is not None:
        place = f" on {element.node}" if element.node else ""
        return Writer(True, f"job {element.array_id}_{element.index}{place}")
    return Writer(False if asked is not None and asked > update.ended else None)


# --- stages that could go on and have no job ---


def held_back(
    ready: Mapping[Task, float],
    live: Sequence[Element],
    workers: Iterable[WorkersOf],
    why: str | None,
    now: float,
) -> Iterator[str]:
    """Yield a line for each job kind that has something to do and no job.

    Args:
        ready: tasks without a worker, whose inputs are committed, and since when (unix time).
        live: elements of the run that wait or run.
        why: why the queue takes no more, from :func:`why_full`; None where it does.
        now: unix time.
    """
    if why is None:
        return
    there = Counter(job_kind_of(element.name) for element in live)
    waiting: dict[str, Task] = {}
    for task in (task for task, since in ready.items() if now - since > _MOMENT):
        waiting.setdefault(task.job_kind, task)
    holders = _holders(there, {one.job_kind: one for one in workers})
    for job_kind, task in waiting.items():
        if not there[job_kind]:
            yield f"{job_kind} of iteration {task.iteration} cannot be submitted: {why}{holders}"


def why_full(
    config: SlurmConfig,
    limits: ClusterLimits | None,
    live: Sequence[Element],
    events: Sequence[Mapping[str, Any]],
) -> str | None:
    """Return why the queue takes no more of a run's jobs; None where nothing says so.

    Args:
        limits: those of the cluster, as passes know them; None where these are not kept.
        live: elements of the run that wait or run.
        events: the journal's end.
    """
    if refusal := standing_refusal(events):
        return str(refusal["message"])
    of_drivers = sum(job_kind_of(element.name) in DRIVERS for element in live)
    if limits is None:
        return None
    own_bound = config.max_submitted or limits.max_jobs // 2
    if len(live) - of_drivers < most_elements(own_bound, limits.max_submit, of_drivers):
        return None
    if limits.max_submit is not None and limits.max_submit - of_drivers <= own_bound:
        return f"you may have {limits.max_submit} jobs in the queue, driver jobs too (MaxSubmitJobs)"
    return f"the run may have {own_bound} jobs of stages in the queue (scheduler.max_submitted)"


def _holders(there: Counter[str], workers: Mapping[str, WorkersOf]) -> str:
    """Return who has the places, and how long those stay who have nothing to do."""
    found = []
    for job_kind, number in there.items():
        if job_kind in DRIVERS:
            continue
        idle = workers[job_kind].waiting if job_kind in workers else 0
        until = workers[job_kind].until if idle else None
        leaves = f", leave {time.strftime('%H:%M:%S', time.localtime(until))}" if until is not None else ""
        found.append(f"{job_kind} {number}" + (f" ({idle} with nothing to do{leaves})" if idle else ""))
    return f"; now there: {', '.join(found)}" if found else ""
