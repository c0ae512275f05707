"""The log to show for a lane: of the attempt that failed last, else the newest."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.run.journal import tail
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import parse_task, task_of
from pipeline.status.logs import Log
from pipeline.watch.screen import LogEnd

_LINES = 200


def read_log_end(
    paths: RunPaths, iteration: int, job_kind: str, events: Sequence[Mapping[str, Any]], has_failed: bool
) -> LogEnd:
    """List the folders of this lane's attempts, and read the end of one log.

    Args:
        has_failed: whether the lane has a shard whose last attempt failed.
    """
    log = failed_log(paths, iteration, job_kind, events) if has_failed else None
    log = log or newest_log(paths, iteration, job_kind)
    if log is None:
        folder = paths.logs(task_of(iteration, job_kind))
        return LogEnd(f"{job_kind} of iteration {iteration} has no log yet", str(folder), ())
    return LogEnd(log.name, str(log.path), tuple(tail(log.path, _LINES)) or ("(empty)",))


def failed_log(
    paths: RunPaths, iteration: int, job_kind: str, events: Sequence[Mapping[str, Any]]
) -> Log | None:
    """Find the log of the last failed attempt that left one."""
    for event in reversed(events):
        if event.get("event") == "failed":
            task = parse_task(event["task"])
            path = paths.task(task).log(int(event["attempt"]))
            if (task.iteration, task.job_kind) == (iteration, job_kind) and path.is_file():
                return Log(path, iteration, job_kind, int(event["attempt"]))
    return None


def newest_log(paths: RunPaths, iteration: int, job_kind: str) -> Log | None:
    """Find the log that was written to last, of the attempt that began last."""
    folder = paths.logs(task_of(iteration, job_kind))
    attempts = {_number(path): path for path in _listing(folder) if _number(path)}
    for number in sorted(attempts, reverse=True):
        logs = [path for path in _listing(attempts[number]) if path.suffix == ".log"]
        if logs:
            return Log(max(logs, key=_modified), iteration, job_kind, number)
    return None


def _number(path: Path) -> int:
    """Return the number of an attempt's folder; 0 for anything else."""
    number = path.name.removeprefix("attempt-")
    return int(number) if number.isdigit() else 0


def _listing(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder)]
    except FileNotFoundError:
        return []


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
