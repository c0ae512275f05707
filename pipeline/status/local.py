"""State of the tasks of a run of this machine: from its events and the logs that attempts have opened."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.run.attempts import AttemptId
from pipeline.run.commits import Record
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Task, task_key
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
            found[str(event.get("task"))] = event
    return found


def task_states(
    paths: RunPaths,
    tasks: Sequence[Task],
    records: Mapping[Task, Record],
    events: Sequence[Event],
    is_driven: bool,
) -> Iterator[TaskState]:
    """Yield the tasks' states, in the order given. Lists the log folder of each last attempt."""
    last, listed = last_attempts(events), cache(_names_in)
    for task in tasks:
        record, event = records.get(task), last.get(task_key(task))
        number = AttemptId.parse(str(event.get("attempt"))).number if event else 0
        if record or event is None:
            yield TaskState(task, record, attempts=number, started=record.started if record else None)
            continue
        has_failed, log = event["event"] == "failed", paths.task(task).log(number)
        is_live = is_driven and not has_failed
        is_running = is_live and log.name in listed(log.parent)
        yield TaskState(
            task,
            is_running=is_running,
            is_waiting=is_live and not is_running,
            has_failed=has_failed,
            attempts=number,
            started=event["time"] if has_failed or is_running else None,
        )


def _names_in(folder: Path) -> Collection[str]:
    """List a folder of logs. Empty for whoever may not read it: a colleague sees the rest of a run."""
    try:
        return names_in(folder)
    except OSError:
        return ()
