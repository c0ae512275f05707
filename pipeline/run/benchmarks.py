"""What the user's program (evaluate.command) said of policies: numbers, or why there are none.

Each is a commit like any other. One that could not be made is committed by the driver without numbers, so
that the run has an end; ``evaluations.jsonl`` lists both kinds as they came.
"""

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.config.conversion import converted
from pipeline.run import journal
from pipeline.run.attempts import new_attempt
from pipeline.run.commits import CorruptData, FileEntry, Record, hash_file, publish
from pipeline.run.durable import replace_durably
from pipeline.run.failures import Failure
from pipeline.run.paths import RunPaths
from pipeline.run.records import Committed
from pipeline.run.tasks import Task, task_key
from slurm.sharedfiles import from_json, is_there, make_folder, read_newest

SCHEMA = "numbers/1"
_MOST_NAMED = 4


@dataclass(frozen=True)
class Measured:
    """One policy's numbers, a line of ``evaluations.jsonl``."""

    policy_version: int
    numbers: Mapping[str, float] = field(default_factory=dict)
    """By metric, such as ``eval/accuracy``."""
    missing: str = ""
    """Reason why there are none; empty: there are."""
    after: int = 0
    """Newest iteration that had a row when the line was written."""


def write_outcome(paths: RunPaths, path: Path, outcome: Measured) -> FileEntry:
    """Write what a commit holds, durably."""
    make_folder(path.parent, paths.root)
    replace_durably(path, json.dumps(asdict(outcome)) + "\n")
    return hash_file(paths, path)


def leave_out(
    paths: RunPaths, failure: Failure, inputs: Sequence[Task], seen: Mapping[Task, Committed]
) -> bool:
    """Commit a benchmark that could not be made, without numbers. Returns whether no attempt was first.

    Args:
        inputs: what it would have read.
        seen: commits that are there.
    """
    task, attempt, now = failure.task, new_attempt(failure.attempt), time.time()
    outcome = Measured(task.iteration, missing=failure.message)
    output = write_outcome(paths, paths.task(task).data(attempt, suffix="json"), outcome)
    record = Record(
        task=task,
        attempt=attempt,
        outputs=(output,),
        inputs={task_key(source): seen[source].fingerprint for source in inputs if source in seen},
        policy_version=task.iteration,
        seed=0,
        rows=0,
        schema=SCHEMA,
        started=now,
        ended=now,
        host=socket.gethostname(),
        pid=os.getpid(),
        job_id="",
    )
    return publish(paths, record)


def measured_of(paths: RunPaths, record: Record | None, version: int) -> Measured:
    """Return what a benchmark's record says; None is one that cannot be read any more."""
    if record is None:
        return Measured(version, missing="its record cannot be read any more")
    numbers = {name: value for name, value in record.metrics.items() if name.startswith("eval/")}
    if record.rows:
        return Measured(version, numbers)
    try:
        said = from_json(read_newest(paths.root / record.output(suffix="json").path))
        return Measured(version, missing=str(said["missing"]))
    except (OSError, CorruptData, KeyError, TypeError, ValueError) as error:
        return Measured(version, missing=f"unknown ({error})")


def note_measured(paths: RunPaths, measured: Iterable[Measured], after: int) -> None:
    """Append lines to ``evaluations.jsonl``, durably. ``after``: newest iteration that has a row."""
    if lines := [asdict(replace(one, after=after)) for one in measured]:
        journal.append(paths.evaluations, *lines)


def read_measured(paths: RunPaths) -> list[Measured]:
    """Read ``evaluations.jsonl``: ascending by version, of each the last line. Lines that are none are left
    out."""
    found = (
        (_of_line(line) for line in journal.read(paths.evaluations)) if is_there(paths.evaluations) else ()
    )
    by_version = {one.policy_version: one for one in found if one is not None}
    return [by_version[version] for version in sorted(by_version)]


def _of_line(line: Mapping[str, Any]) -> Measured | None:
    try:
        return converted(Measured, line)
    except ValueError:
        return None


def trim_measured(paths: RunPaths, version: int, folder: Path) -> None:
    """Remove the lines of ``version`` and later ones, when the run goes back; a copy goes into ``folder``."""
    lines = journal.read(paths.evaluations) if is_there(paths.evaluations) else []
    found = [(line, one) for line in lines if (one := _of_line(line)) is not None]
    kept = [line for line, one in found if one.policy_version < version]
    if len(kept) < len(lines):
        journal.rewrite(folder / paths.evaluations.name, lines)
        journal.rewrite(paths.evaluations, kept)


def with_measured(
    rows: Iterable[Mapping[str, float]], measured: Iterable[Measured]
) -> list[Mapping[str, float]]:
    """Return rows with the numbers of their policies, ascending. A policy that has numbers and no row, such
    as the first, gets one with them alone."""
    by_iteration: dict[int, dict[str, float]] = {int(row["iteration"]): dict(row) for row in rows}
    for one in measured:
        if one.numbers:
            by_iteration.setdefault(one.policy_version, {"iteration": one.policy_version}).update(one.numbers)
    return [by_iteration[iteration] for iteration in sorted(by_iteration)]


def in_words(measured: Sequence[Measured], done: int, total: int) -> str:
    """Say how many policies were measured, and of the last without numbers why; empty where there are none to
    measure."""
    if not total:
        return ""
    missing = [one for one in measured if one.missing]
    told = f"{done - len(missing)}/{total} policies measured by evaluate.command"
    if not missing:
        return told
    which = ", ".join(str(one.policy_version) for one in missing[-_MOST_NAMED:])
    more = f" and {len(missing) - _MOST_NAMED} earlier ones" if len(missing) > _MOST_NAMED else ""
    return f"{told}, {len(missing)} missing: policy {which}{more}, last because {missing[-1].missing}"
