"""Cleaning: what of a run can go since no resume, no report and no later task reads it.

Everything that is committed and may be read again stays: policies, shards, rows, and of the trainers' states
those that retention keeps (:func:`pipeline.run.states.oldest_needed`). Only for a run at rest.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pipeline.run import inside, journal
from pipeline.run.commits import CorruptData, Record, read_record
from pipeline.run.directory import Run
from pipeline.run.packed import NEW, PACKED, log_archives
from pipeline.run.paths import RunPaths
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.records import find_frontier, newest_row
from pipeline.run.retention import is_kept, list_folders, remove_folders
from pipeline.run.sizes import bytes_below
from pipeline.run.states import oldest_needed
from pipeline.run.tasks import PREPARE, Stage, Task, task_of
from slurm.sharedfiles import names_in

_PRIVATE = re.compile(r"\..+\.\d+\.[0-9a-f]{8}")
"""Private names under which files are written before they get their own."""
_SHARD = re.compile(r"shard-(\d{5,})")
_STATES = ("state", "trainer", "critic")


class LeftoverKind(StrEnum):
    """Kinds of what can go."""

    SUPERSEDED = "superseded"
    """What going back has moved aside."""
    STATES = "states"
    """Trainers' states older than those that a resume may begin with."""
    LEFTOVERS = "leftovers"
    """Leftovers of killed attempts and drivers."""
    CACHES = "caches"
    """What is made again where it is needed."""
    LOGS = "logs"
    """Output of the tasks and driver jobs of iterations that are done."""


@dataclass(frozen=True)
class Removable:
    """A file or folder that can go."""

    kind: LeftoverKind
    path: Path
    num_bytes: int
    version: int = 0
    """Version of a state's policy."""


def find_removable(run: Run) -> list[Removable]:
    """Find what can go, but nothing that a link leads to.

    Reads records of done iterations only where attempts have left something.
    """
    done = min(find_frontier(run.plan, run.paths).updated, _newest_row(run))
    found = [
        *_superseded(run.paths),
        *(_states(run, done) if done > run.plan.start else ()),
        *_leftovers(run, done),
        *_caches(run.paths),
        *_logs(run, done),
    ]
    found = [item for item in found if inside.is_inside(run.paths.root, item.path)]
    once = {item.path: item for item in reversed(found)}
    return [item for item in found if once[item.path] is item]


def remove(run: Run, items: Iterable[Removable]) -> Iterator[str]:
    """Remove them, for the holder of the run's lease. Yields a line for each that could not be removed."""
    items = list(items)
    counts = {str(kind): sum(item.kind is kind for item in items) for kind in LeftoverKind}
    journal.event(run.paths.events, "cleaned", **{kind: count for kind, count in counts.items() if count})
    for item in items:
        try:
            if item.kind is LeftoverKind.STATES:
                remove_folders(run.paths, item.version, [run.paths.relative(item.path)])
            else:
                with contextlib.suppress(FileNotFoundError):
                    inside.remove(run.paths.root, item.path)
        except (OSError, CorruptData) as error:
            yield f"{item.path} could not be removed: {error}"


def _newest_row(run: Run) -> int:
    return newest_row(journal.read_tail(run.paths.metrics), run.plan.start)


def _item(kind: LeftoverKind, path: Path, version: int = 0) -> Removable:
    return Removable(kind, path, bytes_below(path), version)


def _superseded(paths: RunPaths) -> Iterator[Removable]:
    yield from (
        _item(LeftoverKind.SUPERSEDED, paths.superseded / name) for name in sorted(names_in(paths.superseded))
    )


def _states(run: Run, newest: int) -> Iterator[Removable]:
    """Yield states before those that ``newest`` needs, but for what update.keep_every keeps. Those from which
    an update that is lost is made again stay in any case."""
    least, needed, every = (
        run.plan.least_kept,
        oldest_needed(run.plan, run.paths, newest),
        run.config.update.keep_every,
    )
    for version, folders in list_folders(run.paths).items():
        if not is_kept(version, newest, least, every, needed=needed):
            going = [folder for folder in folders if folder.split("/")[0] in _STATES]
            yield from (_item(LeftoverKind.STATES, run.paths.root / folder, version) for folder in going)


def _leftovers(run: Run, done: int) -> Iterator[Removable]:
    yield from (_item(LeftoverKind.LEFTOVERS, path) for path in _attempts_folders(run.paths))
    for folder, tasks in _stage_folders(run, done):
        yield from (_item(LeftoverKind.LEFTOVERS, path) for path in _losing_files(run.paths, folder, tasks))
    private = (name for name in sorted(names_in(run.paths.root)) if _PRIVATE.fullmatch(name))
    yield from (_item(LeftoverKind.LEFTOVERS, run.paths.root / name) for name in private)


def _attempts_folders(paths: RunPaths) -> Iterator[Path]:
    """Yield folders of policies and states that no commit record names: of attempts that did not win."""
    for version, folders in list_folders(paths).items():
        try:
            records = [read_record(paths, maker) for maker in (policy_maker(version), state_of(version))]
        except CorruptData:  # which folder is its own cannot be known
            continue
        named = {entry.folder for record in records if record for entry in record.outputs}
        yield from (paths.root / folder for folder in folders if folder not in named)


def _stage_folders(run: Run, done: int) -> Iterator[tuple[Path, str]]:
    """Yield the folders of the stages of iterations that are done, and of what came before the first, with
    their job kinds."""
    yield run.paths.data, str(Stage.PREPARE)
    for iteration in range(run.plan.start + 1, done + 1):
        folder = run.paths.iterations / f"{iteration:05d}"
        yield from ((folder / name, name) for name in sorted(names_in(folder)))


def _losing_files(paths: RunPaths, folder: Path, job_kind: str) -> Iterator[Path]:
    """Yield files of a stage's folder that no commit record of it names; of tasks without one none."""
    by_stem: dict[str, list[str]] = {}
    for name in sorted(names_in(folder)):
        if _PRIVATE.fullmatch(name):
            yield folder / name
        else:
            by_stem.setdefault(name.split(".")[0], []).append(name)
    for stem, names in by_stem.items():
        if f"{stem}.json" in names and _has_several_attempts(stem, names):
            record = _record_of(paths, folder, job_kind, stem)
            yield from _not_named(folder, stem, names, record) if record else ()


def _has_several_attempts(stem: str, names: Sequence[str]) -> bool:
    """Whether more than one attempt, or an unfinished one, has written files of a task: most have not."""
    apart = {f"{stem}.json", f"{stem}.thinned.json"}
    parts = [name.split(".") for name in names if name not in apart]
    writers = {_writer(part) for part in parts if len(part) > 2}
    return len(writers) > 1 or any("partial" in part for part in parts)


def _writer(parts: Sequence[str]) -> str:
    """Return the id of the attempt that wrote a file, from the parts of its name. An id may end with a
    position: ``2-4711_3r0.1``."""
    return ".".join(parts[-3:-1]) if parts[-2].isdecimal() else parts[-2]


def _record_of(paths: RunPaths, folder: Path, job_kind: str, stem: str) -> Record | None:
    try:
        task = _task_of(folder, job_kind, stem)
        return read_record(paths, task) if task else None
    except (CorruptData, ValueError):  # which attempt won is not known
        return None


def _task_of(folder: Path, job_kind: str, stem: str) -> Task | None:
    if job_kind == Stage.PREPARE:
        return PREPARE if stem == PREPARE.file_stem else None
    shard = _SHARD.fullmatch(stem)
    return task_of(int(folder.parent.name), job_kind, int(shard[1])) if shard else None


def _not_named(folder: Path, stem: str, names: Iterable[str], record: Record) -> Iterator[Path]:
    kept = {Path(entry.path).name for entry in record.outputs}
    kept |= {f"{stem}.json", f"{stem}.thinned.json", NEW, PACKED}
    yield from (folder / name for name in names if name not in kept)


def _caches(paths: RunPaths) -> Iterator[Removable]:
    found = (paths.compiled.parent, paths.wandb / "cache")
    yield from (_item(LeftoverKind.CACHES, path) for path in found if path.is_dir())


def _logs(run: Run, done: int) -> Iterator[Removable]:
    """Yield the folders of logs, of iterations that are done, the start's once the first is, and archives of
    nothing but logs."""
    for name in sorted(names_in(run.paths.log_root)):
        number = name.split("-")[0]
        if number.isdecimal() and int(number) <= done and done > 0:
            yield _item(LeftoverKind.LOGS, run.paths.log_root / name)
    for iteration in range(run.plan.start + 1, done + 1):
        yield from (_item(LeftoverKind.LOGS, path) for path in log_archives(run.paths, iteration))
