"""What is on disk, as far as the current iterations go: commits, and what failed attempts left behind."""

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline import journal
from pipeline.commits import CorruptData, Record, check_sizes, read_record, verify_outputs
from pipeline.packed import BadArchive, archives, packed_names
from pipeline.paths import RunPaths
from pipeline.plan import Plan
from pipeline.reconcile import Committed, Failure, FailureKind
from pipeline.tasks import PREPARE, Stage, Task, parse_task
from slurm.sharedfiles import is_there, make_folder, names_in, read_shared

_TAIL_BYTES = 1 << 16
"""Bytes at the end of metrics.jsonl that hold more than its last row."""


@dataclass
class Records:
    """Commit records read so far. A record never changes once published; only retracting removes it."""

    paths: RunPaths
    known: dict[Task, Record] = field(default_factory=dict)
    corrupt: dict[Task, str] = field(default_factory=dict)
    damaged: dict[Task, Record] = field(default_factory=dict)
    """Of corrupt tasks: records that can be read, although what they name cannot."""

    def refresh(self, tasks: Iterable[Task]) -> None:
        """Look for the records of ``tasks`` that are not known yet: one listing per folder."""
        unknown = (task for task in tasks if task not in self.known and task not in self.corrupt)
        for task in recorded(self.paths, dict.fromkeys(unknown)):
            self._read(task)

    def get(self, task: Task) -> Record | None:
        self.refresh([task])
        return self.known.get(task)

    def published(self, tasks: Collection[Task]) -> set[Task]:
        """Those of ``tasks`` that have a record, whether or not it stands."""
        self.refresh(tasks)
        return {task for task in tasks if task in self.known or task in self.corrupt}

    def readable(self, task: Task) -> Record | None:
        """The record, whether or not its data are still there: enough for what it says itself."""
        self.refresh([task])
        return self.known.get(task) or self.damaged.get(task)

    def doubt(self, task: Task) -> None:
        """Read and hash everything that a suspected task committed."""
        record = self.get(task)
        if record is not None:
            self._check(record, verify_outputs)

    def committed(self) -> dict[Task, Committed]:
        return {task: Committed(r.fingerprint, r.inputs) for task, r in self.known.items()}

    def forget(self, task: Task) -> None:
        for found in (self.known, self.corrupt, self.damaged):
            found.pop(task, None)

    def keep_only(self, tasks: Iterable[Task]) -> None:
        """Drop what is no longer looked at, so that a long run does not grow in memory."""
        wanted = set(tasks)
        self.known = {task: record for task, record in self.known.items() if task in wanted}
        self.damaged = {task: record for task, record in self.damaged.items() if task in wanted}

    def _read(self, task: Task) -> None:
        try:
            record = read_record(self.paths, task)
        except CorruptData as error:
            self.corrupt[task] = str(error)
            return
        if record is not None:
            self.known[task] = record
            self._check(record, check_sizes)

    def _check(self, record: Record, check: Callable[[RunPaths, Record], None]) -> None:
        try:
            check(self.paths, record)
        except CorruptData as error:
            self.damaged[record.task] = self.known.pop(record.task)
            self.corrupt[record.task] = str(error)


def recorded(paths: RunPaths, tasks: Iterable[Task]) -> Iterator[Task]:
    """Those of ``tasks`` that have a commit record, as a file or packed. Every folder is listed once."""
    wanted: dict[tuple[int, str], list[Task]] = {}
    for task in tasks:
        wanted.setdefault((task.iteration, task.purpose), []).append(task)
    for group in wanted.values():
        names = names_of_stage(paths.task(group[0]).folder)
        if group[0].stage.is_sharded and any(task.record_name not in names for task in group):
            names |= _names_packed(paths, group)
        yield from (task for task in group if names and task.record_name in names)


def names_of_stage(folder: Path) -> set[str]:
    """Names in a stage's folder. One that another machine moved away, going back, is not looked into."""
    return names_in(folder) if is_there(folder) else set()


def is_committed(paths: RunPaths, task: Task) -> bool:
    """Whether the task has a record, as the file server has it."""
    return task.record_name in names_of_stage(paths.task(task).folder)


def _names_packed(paths: RunPaths, tasks: Sequence[Task]) -> set[str]:
    """Names of files of one folder's ``tasks`` that were packed."""
    start = f"{paths.relative(paths.task(tasks[0]).folder)}/"
    try:
        packed = packed_names(paths, tasks[0].iteration)
    except BadArchive:  # it is there: whoever reads a record finds out what is wrong
        return {task.record_name for task in tasks}
    return {name.removeprefix(start) for name in packed if name.startswith(start)}


@dataclass(frozen=True)
class Frontier:
    """How far a run has come."""

    updated: int
    """The newest iteration whose update is committed; -1 before prepare is."""
    evaluated: int
    """How many of the plan's evaluations are committed."""

    def is_complete(self, plan: Plan, newest_row: int) -> bool:
        """Whether everything is committed, and every iteration up to the last has its row."""
        is_trained = self.updated >= plan.iterations and self.evaluated == len(plan.evaluations())
        return is_trained and newest_row >= plan.iterations


def find_frontier(plan: Plan, paths: RunPaths) -> Frontier:
    """Found by halving, so that the cost does not grow with the run: commits are contiguous.

    But for one: an evaluation that lags behind may have found its policy corrupt. Then the run goes on from
    before that policy, and passes over the later ones, which are committed, once it is there again.
    """
    if not is_committed(paths, PREPARE):
        return Frontier(-1, 0)
    first, left = plan.start + 1, plan.iterations - plan.start
    updated = plan.start + _count_true(left, lambda i: is_committed(paths, Task(first + i, Stage.UPDATE)))
    updated = _before_gap(plan, paths, updated)
    evaluations = plan.evaluations()
    evaluated = _count_true(
        len(evaluations), lambda i: is_committed(paths, Task(evaluations[i], Stage.EVALUATE))
    )
    if evaluated < len(evaluations):
        lagging = evaluations[evaluated]
        if plan.start < lagging <= updated and not is_committed(paths, Task(lagging, Stage.UPDATE)):
            updated = lagging - 1
    return Frontier(updated, evaluated)


def _before_gap(plan: Plan, paths: RunPaths, updated: int) -> int:
    """The newest iteration before one that has neither an update nor a row.

    Halving may pass over such a gap. What stands behind it was made from what was taken back; where there is
    a row the update was there, and only its record was lost since.
    """
    try:
        rows = journal.read_tail(paths.metrics, _TAIL_BYTES)
    except OSError:  # rows that cannot be read never stop what trains
        return updated
    for iteration in range(newest_row(rows, plan.start) + 1, updated):
        if not is_committed(paths, Task(iteration, Stage.UPDATE)):
            return iteration - 1
    return updated


def newest_row(rows: Sequence[Mapping[str, Any]], start: int) -> int:
    """Iteration of the last row; without any the one that the run begins after."""
    numbers = [row["iteration"] for row in rows[-1:] if isinstance(row.get("iteration"), int)]
    return max(numbers, default=start)


def _count_true(size: int, holds: Callable[[int], bool]) -> int:
    """How many leading positions hold, given that all that hold are leading."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            low = middle + 1
        else:
            high = middle
    return low


def last_attempt_number(paths: RunPaths, task: Task) -> int:
    """The highest attempt number that has a log; 0 when the task was never tried."""
    numbers = [0]
    for folder in paths.logs(task).glob("attempt-*"):
        if f"{task.file_stem}.log" in names_in(folder):
            numbers.append(int(folder.name.removeprefix("attempt-")))
    return max(numbers)


def explain_failure(paths: RunPaths, unsaid: Failure) -> tuple[Failure, Task | None]:
    """Why an attempt ended without a commit, and which input it suspects.

    Args:
        unsaid: the failure as it looks from outside, if the attempt itself left no word.
    """
    path = paths.task(unsaid.task).failure(unsaid.attempt)
    try:
        said = json.loads(read_shared(path))
    except FileNotFoundError:
        return unsaid, None
    suspect = parse_task(said["suspect"]) if said["suspect"] else None
    return replace(unsaid, kind=FailureKind(said["kind"]), message=said["message"]), suspect


def in_words(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by signal {-exit_code}"
    return f"ended with exit code {exit_code} and said nothing"


def sweep(paths: RunPaths, records: Iterable[Record], spared: Iterable[Task] = ()) -> None:
    """Remove what losing attempts at the tasks of a finished iteration left behind: nobody can read it.

    Nothing is removed of ``spared`` tasks, whose records are lost: which attempt won is not known.

    An attempt that still runs beside the winner loses its files under its hands, as it would at its commit.
    """
    kept, folders = set(), set()
    for task in spared:
        kept |= set(paths.task(task).folder.glob(f"{task.file_stem}.*"))
    for record in records:
        files = paths.task(record.task)
        kept |= {paths.root / entry.path for entry in record.outputs} | {files.record, files.thinned}
        kept |= set(archives(paths, record.task.iteration))
        folders.add(files.folder)
        if record.task.stage is Stage.UPDATE:
            for parent in (paths.policies, paths.critics, paths.trainers):
                for folder in parent.glob(f"{record.task.iteration:05d}.*"):
                    if record.attempt not in folder.name:
                        shutil.rmtree(folder)
    for path in (path for folder in folders if folder.is_dir() for path in folder.iterdir()):
        if path not in kept:
            path.unlink(missing_ok=True)


def move_aside(paths: RunPaths, tasks: Iterable[Task], label: str) -> Path:
    """Move commits and every attempt's files of ``tasks`` under ``superseded/``; nothing is deleted.

    The record goes first: from then on the task is not done, whatever happens to the rest.
    """
    target = fresh_folder(paths.superseded, label)
    move_into(target, paths, tasks)
    return target


def move_into(target: Path, paths: RunPaths, tasks: Iterable[Task]) -> None:
    """Every folder is listed once, however many tasks it holds."""
    listings: dict[Path, dict[str, list[Path]]] = {}
    for task in tasks:
        files = paths.task(task)
        if files.folder not in listings:
            listings[files.folder] = _by_stem(files.folder)
        moved = [files.record, *listings[files.folder].get(task.file_stem, ())]
        if task.stage is Stage.UPDATE:
            moved += _folders_of_update(paths, task)
        for path in dict.fromkeys(moved):
            _move(path, target, paths)


def _by_stem(folder: Path) -> dict[str, list[Path]]:
    """The files of a stage's folder, by the task they belong to."""
    grouped: dict[str, list[Path]] = {}
    for name in sorted(names_of_stage(folder)):
        grouped.setdefault(name.split(".")[0], []).append(folder / name)
    return grouped


def _folders_of_update(paths: RunPaths, task: Task) -> Iterator[Path]:
    """Every attempt's models and trainer state; the links to the winner's are removed."""
    for parent in (paths.policies, paths.critics, paths.trainers):
        (parent / f"{task.iteration:05d}").unlink(missing_ok=True)
        yield from sorted(parent.glob(f"{task.iteration:05d}.*"))


def move_history(target: Path, paths: RunPaths, tasks: Sequence[Task]) -> None:
    """Move the folders of ``tasks`` away whole, with all that running attempts may still put there.

    Args:
        tasks: latest first, so that a move that is cut short leaves a run that is whole up to there.
    """
    for folder in dict.fromkeys(paths.task(task).folder for task in tasks):
        move_folder(folder, target, paths)
    for task in tasks:
        if task.stage is Stage.UPDATE:
            for folder in list(_folders_of_update(paths, task)):
                _move(folder, target, paths)


def move_folder(folder: Path, target: Path, paths: RunPaths) -> None:
    """Move a folder away, and make an empty one in its place: else another machine whose client remembers the
    old one under this name, and looks into it, would go on to find it there."""
    if is_there(folder):
        _move(folder, target, paths)
        make_folder(folder)


def _move(path: Path, target: Path, paths: RunPaths) -> None:
    if is_there(path):
        destination = target / path.relative_to(paths.root)
        destination.parent.mkdir(parents=True, exist_ok=True)
        path.rename(destination)


def fresh_folder(parent: Path, label: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, 10_000):
        folder = parent / f"{stamp}-{label}{f'-{number}' if number > 1 else ''}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise RuntimeError(f"{parent} is full of folders named {stamp}-{label}-*")
