"""State of the tasks of a run of this machine: from its events and the logs that attempts have opened."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.run.commits import Record
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Task, parse_task
from pipeline.status.lanes import TaskState
from slurm.sharedfiles import names_in

Event = Mapping[str, Any]


def last_attempts(events: Sequence[Event]) -> dict[str, Event]:
    """Find the events of last attempts, by task key. What an earlier driver launched died with it. Pure."""
    found: dict[str, Event] = {}
    for event in events:
        if event["event"] == "driver_started":
            found = {key: last for key, last in found.items() if last["event"] == "failed"}
        elif event["event"] in ("launched", "failed"):
            found[event["task"]] = event
    return found


def task_states(
    paths: RunPaths,
    tasks: Sequence[Task],
    records: Mapping[Task, Record],
    events: Sequence[Event],
    is_driven: bool,
) -> Iterator[TaskState]:
    """Yield the tasks' states, in the order given. Lists the log folder of each last attempt."""
    last = {parse_task(key): event for key, event in last_attempts(events).items()}
    listed = cache(names_in)
    for task in tasks:
        yield _state(paths, task, records.get(task), last.get(task), is_driven, listed)


def _state(
    paths: RunPaths,
    task: Task,
    record: Record | None,
    last: Event | None,
    is_driven: bool,
    listed: Callable[[Path], set[str]],
) -> TaskState:
    number = int(str(last["attempt"]).partition("-")[0]) if last else 0
    if record:
        return TaskState(task, record, attempts=number, started=record.started)
    if last is None:
        return TaskState(task)
    if last["event"] == "failed":
        return TaskState(task, has_failed=True, attempts=number, started=last["time"])
    log = paths.task(task).log(number)
    is_running = is_driven and log.name in listed(log.parent)
    started = last["time"] if is_running else None
    return TaskState(
        task,
        is_running=is_running,
        is_waiting=is_driven and not is_running,
        attempts=number,
        started=started,
    )
