"""State of the tasks of a run of this machine: from its events and the logs that attempts have opened."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.run.attempts import AttemptId
from pipeline.run.commits import Record
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import Task, parse_task
from slurm.sharedfiles import names_in


@dataclass(frozen=True)
class LocalTask:
    """State of one task, as far as it is known."""

    task: Task
    is_done: bool = False
    is_running: bool = False
    is_waiting: bool = False
    """Whether it was launched and waits for a slot."""
    has_failed: bool = False
    attempts: int = 0
    started: float | None = None
    ended: float | None = None


@dataclass(frozen=True)
class Attempt:
    """Last attempt at a task that the events tell of."""

    number: int
    launched: float
    has_failed: bool = False


def last_attempts(events: Sequence[Mapping[str, Any]]) -> dict[str, Attempt]:
    """Find the last attempts, by task key. What an earlier driver launched died with it. Pure."""
    found: dict[str, Attempt] = {}
    for event in events:
        kind, key = event.get("event"), str(event.get("task"))
        if kind == "driver_started":
            found = {key: attempt for key, attempt in found.items() if attempt.has_failed}
        elif kind == "launched":
            found[key] = Attempt(AttemptId.parse(event["attempt"]).number, event["time"])
        elif kind == "failed":
            found[key] = Attempt(int(event["attempt"]), event["time"], has_failed=True)
    return found


def local_tasks(
    paths: RunPaths,
    tasks: Sequence[Task],
    records: Mapping[Task, Record],
    events: Sequence[Mapping[str, Any]],
    is_driven: bool,
) -> list[LocalTask]:
    """Determine the tasks' states, in the order given. Lists the log folder of each last attempt."""
    attempts = {parse_task(key): attempt for key, attempt in last_attempts(events).items()}
    begun = _begun(paths, {task: attempts[task] for task in tasks if task in attempts})
    return [task_of(task, records.get(task), attempts.get(task), task in begun, is_driven) for task in tasks]


def _begun(paths: RunPaths, attempts: Mapping[Task, Attempt]) -> Collection[Task]:
    """Find the tasks whose last attempt has opened its log: one listing per folder."""
    folders = {paths.task(task).attempt_logs(attempt.number) for task, attempt in attempts.items()}
    names = {folder: names_in(folder) for folder in folders}
    return {
        task
        for task, attempt in attempts.items()
        if (log := paths.task(task).log(attempt.number)).name in names[log.parent]
    }


def task_of(
    task: Task, record: Record | None, attempt: Attempt | None, has_begun: bool, is_driven: bool
) -> LocalTask:
    """Determine one task's state. Pure."""
    number = attempt.number if attempt else 0
    if record:
        return LocalTask(task, is_done=True, attempts=number, started=record.started, ended=record.ended)
    if attempt is None:
        return LocalTask(task)
    if attempt.has_failed:
        return LocalTask(task, has_failed=True, attempts=number, started=attempt.launched)
    started = attempt.launched if has_begun and is_driven else None
    return LocalTask(
        task,
        is_running=has_begun and is_driven,
        is_waiting=not has_begun and is_driven,
        attempts=number,
        started=started,
    )
