"""Superseded or spoilt commits are moved aside, never deleted; only losing attempts' files are removed."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pipeline.run import inside
from pipeline.run.commits import Record
from pipeline.run.packed import archives, log_archives
from pipeline.run.paths import RunPaths
from pipeline.run.plan import state_of
from pipeline.run.records import names_of_stage
from pipeline.run.tasks import Stage, Task
from slurm.sharedfiles import is_there, make_folder


def remove_losers(paths: RunPaths, records: Iterable[Record], spared: Iterable[Task] = ()) -> None:
    """Remove what losing attempts at the tasks of a finished iteration left behind: no reader needs it.

    Nothing is removed of ``spared`` tasks, whose records are lost: which attempt won is not known.

    An attempt that still runs beside the winner loses its files now, as it would at its commit.
    """
    kept, folders = set(), set()
    for task in spared:
        kept |= set(paths.task(task).folder.glob(f"{task.file_stem}.*"))
    for record in records:
        files = paths.task(record.task)
        kept |= {paths.root / entry.path for entry in record.outputs} | {files.record, files.thinned}
        folders.add(files.folder)
        if record.task.stage is Stage.UPDATE:
            kept |= {*archives(paths, record.task.iteration), *log_archives(paths, record.task.iteration)}
            kept |= set(files.claims())  # by which passes know who still writes the trainer's state
            for parent in paths.of_updates:
                for folder in parent.glob(f"{record.task.iteration:05d}.*"):
                    if folder.name != f"{record.task.iteration:05d}.{record.attempt}":
                        inside.remove(paths.root, folder)
    for path in (path for folder in folders if folder.is_dir() for path in folder.iterdir()):
        if path not in kept:
            with contextlib.suppress(FileNotFoundError):
                inside.remove(paths.root, path)


def move_aside(paths: RunPaths, tasks: Iterable[Task], label: str) -> Path:
    """Move commits and every attempt's files of ``tasks`` under ``superseded/``; nothing is deleted.

    The record goes first: from then on the task is not done, whatever happens to the rest. With an update
    goes the trainer's state behind it.
    """
    target = fresh_folder(paths.superseded, label)
    listings: dict[Path, dict[str, list[Path]]] = {}  # of each folder once, however many tasks it holds
    for task in with_states(tasks):
        files = paths.task(task)
        if files.folder not in listings:
            grouped: dict[str, list[Path]] = {}
            for name in sorted(names_of_stage(files.folder)):
                grouped.setdefault(name.split(".")[0], []).append(files.folder / name)
            listings[files.folder] = grouped
        moved = [files.record, *listings[files.folder].get(task.file_stem, ())]
        moved += _folders_of(paths, task)
        for path in dict.fromkeys(moved):
            _move(path, target, paths)
    return target


def with_states(tasks: Iterable[Task]) -> Iterator[Task]:
    """Yield the tasks, and before each update the state that was made with it, which goes first."""
    for task in tasks:
        if task.stage is Stage.UPDATE:
            yield state_of(task.iteration)
        yield task


def _folders_of(paths: RunPaths, task: Task) -> Iterator[Path]:
    """Yield every attempt's models, or trainer's state, and remove the links to the winner's."""
    of_update = paths.of_updates
    parents = {Stage.UPDATE: of_update, Stage.STATE: (paths.states,)}
    for parent in parents.get(task.stage, ()):
        with contextlib.suppress(FileNotFoundError):
            inside.remove(paths.root, parent / f"{task.iteration:05d}")
        yield from sorted(parent.glob(f"{task.iteration:05d}.*"))


def _move(path: Path, target: Path, paths: RunPaths) -> None:
    if is_there(path):
        destination = target / path.relative_to(paths.root)
        destination.parent.mkdir(parents=True, exist_ok=True)
        inside.move(paths.root, path, destination)


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


def move_history(target: Path, paths: RunPaths, tasks: Sequence[Task]) -> None:
    """Move the folders of ``tasks`` away whole, with all that running attempts may still put there.

    Args:
        tasks: latest first, so that a move that is cut short leaves a run that is whole up to there.
    """
    for folder in dict.fromkeys(paths.task(task).folder for task in tasks):
        move_folder(folder, target, paths)
    for task in tasks:
        for folder in list(_folders_of(paths, task)):
            _move(folder, target, paths)


def move_folder(folder: Path, target: Path, paths: RunPaths) -> None:
    """Move a folder away, and make an empty one in its place, so that other machines notice the move.

    Else a client that remembers the old folder under this name, and lists it, would go on finding it.
    """
    if is_there(folder):
        _move(folder, target, paths)
        make_folder(folder)
