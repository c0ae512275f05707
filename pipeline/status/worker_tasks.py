"""Where the tasks of a run on Slurm stand: workers take tasks as they come, and say in beats which. Pure."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.executors.slurm.queue import Queue, is_live, worker_of
from pipeline.run.commits import Record
from pipeline.run.endings import NO_ENDINGS, Endings
from pipeline.run.plan import Plan
from pipeline.run.submissions import Submission
from pipeline.run.tasks import Task, parse_task
from pipeline.status.lanes import TaskState
from pipeline.status.slurm import match, ready_since, running_elements
from pipeline.status.trainer_state import Writer
from pipeline.workers.beats import Beat, Doing
from slurm.query import Element
from slurm.states import Phase, phase_of


@dataclass(frozen=True)
class Crew:
    """Jobs of a run: those that the queue shows, what they were submitted for, what they say."""

    submissions: Sequence[Submission]
    queue: Queue
    beats: Sequence[Beat]
    endings: Endings = NO_ENDINGS
    """How attempts at the tasks at hand ended."""
    begun: float = 0.0
    """Unix time at which a person last submitted the run."""
    at_work: Mapping[Task, tuple[Element, Beat]] = field(init=False)
    """Tasks that jobs do which run."""
    beginning: Mapping[Task, Element] = field(init=False)
    """Tasks that jobs were submitted for which wait in the queue, or start up."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "at_work", dict(_at_work(self.queue, self.beats)))
        object.__setattr__(self, "beginning", _beginning(self.submissions, self.queue, self.beats))

    @property
    def failed(self) -> Iterator[Task]:
        """Tasks of the attempts that failed, each as often as it has some."""
        yield from (parse_task(ending.task) for ending in self.endings.values() if ending.is_failure)

    @property
    def live(self) -> set[Task]:
        """Tasks that somebody does, or that somebody was submitted for who has not begun."""
        return {*self.at_work, *self.beginning}


def _at_work(queue: Queue, beats: Iterable[Beat]) -> Iterator[tuple[Task, tuple[Element, Beat]]]:
    running = running_elements(queue)
    for beat in beats:
        if beat.doing is Doing.BUSY and beat.worker in running:
            try:
                yield parse_task(beat.task), (running[beat.worker], beat)
            except ValueError:  # another version's
                continue


def _beginning(submissions: Sequence[Submission], queue: Queue, beats: Iterable[Beat]) -> dict[Task, Element]:
    moved_on = {beat.worker for beat in beats if beat.doing is not Doing.STARTING}
    begins = {(s.name, index): s.begin_of(index) for s in submissions for index in s.indices}
    live = (e for e in queue.elements if is_live(e) and str(worker_of(e)) not in moved_on)
    shown = [_with_reason(element, begins.get((element.name, element.index))) for element in live]
    return match(submissions, Queue(shown))


def _with_reason(element: Element, begins: float | None) -> Element:
    """Say of one that was submitted early why it waits: Slurm's word for that means other waits too."""
    if begins is None or element.reason.strip("()") != "BeginTime":
        return element
    moment = time.strftime("%H:%M:%S", time.localtime(begins))
    return replace(element, reason=f"starts at {moment}, shortly before its input is expected")


def task_states(
    plan: Plan, tasks: Sequence[Task], crew: Crew, records: Mapping[Task, Record], now: float
) -> Iterator[TaskState]:
    """Determine the tasks' states."""
    failures = Counter(crew.failed)
    for task in tasks:
        ready = ready_since(plan, task, records)
        yield _state(task, crew, records.get(task), failures[task], ready, now)


def _state(
    task: Task, crew: Crew, record: Record | None, failures: int, ready: float | None, now: float
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


def writer_of(update: Record, crew: Crew, asked: float | None) -> Writer:
    """Find the attempt that committed an update and goes on to write the trainer's state.

    Args:
        asked: unix time at which Slurm answered, None: it has not; what was committed later may not be in it.
    """
    element, beat = crew.at_work.get(update.task, (None, None))
    if element is not None and beat is not None and beat.attempt == update.attempt:
        place = f" on {element.node}" if element.node else ""
        return Writer(True, f"job {element.array_id}_{element.index}{place}")
    return Writer(False if asked is not None and asked > update.ended else None)
