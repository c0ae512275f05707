"""What is on disk, as far as the current iterations go: commits, and what failed attempts left behind."""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.commits import CorruptData, Record, check_sizes, read_record, verify_outputs
from pipeline.paths import RunPaths
from pipeline.plan import Plan
from pipeline.reconcile import Committed, Failure, FailureKind
from pipeline.tasks import PREPARE, Stage, Task, parse_task


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
        unknown: dict[tuple[int, str], list[Task]] = {}
        for task in dict.fromkeys(tasks):
            if task not in self.known and task not in self.corrupt:
                unknown.setdefault((task.iteration, task.purpose), []).append(task)
        for wanted in unknown.values():
            names = _names_in(self.paths.task(wanted[0]).folder)
            for task in wanted if names else ():
                if self.paths.task(task).record.name in names:
                    self._read(task)

    def get(self, task: Task) -> Record | None:
        self.refresh([task])
        return self.known.get(task)

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


def _names_in(folder: Path) -> set[str]:
    """Opening a folder asks the file server; whether it exists may be answered from an old memory."""
    try:
        return {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return set()


@dataclass(frozen=True)
class Frontier:
    """How far a run has come."""

    updated: int
    """The newest iteration whose update is committed; -1 before prepare is."""
    evaluated: int
    """How many of the plan's evaluations are committed."""


def find_frontier(plan: Plan, paths: RunPaths) -> Frontier:
    """Found by halving, so that the cost does not grow with the run: commits are contiguous.

    But for one: an evaluation that lags behind may have found its policy corrupt. Then the run goes on from
    before that policy, and passes over the later ones, which are committed, once it is there again.
    """
    if not paths.task(PREPARE).record.exists():
        return Frontier(-1, 0)
    first, left = plan.start + 1, plan.iterations - plan.start
    updated = plan.start + _count_true(left, lambda i: _exists(paths, Task(first + i, Stage.UPDATE)))
    evaluations = plan.evaluations()
    evaluated = _count_true(len(evaluations), lambda i: _exists(paths, Task(evaluations[i], Stage.EVALUATE)))
    if evaluated < len(evaluations):
        lagging = evaluations[evaluated]
        if plan.start < lagging <= updated and not _exists(paths, Task(lagging, Stage.UPDATE)):
            updated = lagging - 1
    return Frontier(updated, evaluated)


def _exists(paths: RunPaths, task: Task) -> bool:
    return paths.task(task).record.exists()


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
        if (folder / f"{task.file_stem}.log").exists():
            numbers.append(int(folder.name.removeprefix("attempt-")))
    return max(numbers)


def explain_failure(paths: RunPaths, unsaid: Failure) -> tuple[Failure, Task | None]:
    """Why an attempt ended without a commit, and which input it suspects.

    Args:
        unsaid: the failure as it looks from outside, if the attempt itself left no word.
    """
    path = paths.task(unsaid.task).failure(unsaid.attempt)
    try:
        said = json.loads(path.read_text())
    except FileNotFoundError:
        return unsaid, None
    suspect = parse_task(said["suspect"]) if said["suspect"] else None
    return replace(unsaid, kind=FailureKind(said["kind"]), message=said["message"]), suspect


def in_words(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by signal {-exit_code}"
    return f"ended with exit code {exit_code} and said nothing"


def sweep(paths: RunPaths, records: Iterable[Record]) -> None:
    """Remove what losing attempts at the tasks of a finished iteration left behind: nobody can read it.

    An attempt that still runs beside the winner loses its files under its hands, as it would at its commit.
    """
    kept, folders = set(), set()
    for record in records:
        files = paths.task(record.task)
        kept |= {paths.root / entry.path for entry in record.outputs} | {files.record, files.thinned}
        folders.add(files.folder)
        if record.task.stage is Stage.UPDATE:
            for parent in (paths.policies, paths.critics, paths.trainers):
                for folder in parent.glob(f"{record.task.iteration:05d}.*"):
                    if record.attempt not in folder.name:
                        shutil.rmtree(folder)
    for path in (path for folder in folders for path in folder.iterdir()):
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
            if path.exists():
                destination = target / path.relative_to(paths.root)
                destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, destination)


def _by_stem(folder: Path) -> dict[str, list[Path]]:
    """The files of a stage's folder, by the task they belong to."""
    grouped: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        grouped.setdefault(path.name.split(".")[0], []).append(path)
    return grouped


def _folders_of_update(paths: RunPaths, task: Task) -> Iterator[Path]:
    """Every attempt's models and trainer state; the links to the winner's are removed."""
    for parent in (paths.policies, paths.critics, paths.trainers):
        (parent / f"{task.iteration:05d}").unlink(missing_ok=True)
        yield from sorted(parent.glob(f"{task.iteration:05d}.*"))


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
