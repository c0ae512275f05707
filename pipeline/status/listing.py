"""Runs below a folder, a line each: what is read of each is little, so that a thousand take a second or two.

Of a run these are read: run.json, some keys of config.yaml, the end of metrics.jsonl, of one that is not
complete also the lease, people's requests and the journal's end; where a program measures policies, whether
the last one was. Nothing is written. What cannot be read makes an entry that says so, never an error.
"""

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.run import journal
from pipeline.run.lease import holder_of
from pipeline.run.originals import find_original
from pipeline.run.paths import SWEEP_MANIFEST, RunPaths, holds_identity
from pipeline.run.sizes import bytes_below
from pipeline.run.tasks import Stage, Task
from pipeline.status.journal_end import machine_state, slurm_state
from slurm.errors import UserError
from slurm.sharedfiles import from_json, is_there, read_plainly, unsealed

if TYPE_CHECKING:
    from pipeline.run.owner import Owner

CORRUPT, NOT_BEGUN = "corrupt", "not begun"
_LEVELS = 2
"""Levels of folders below the one that is named in which runs are looked for."""
_THREADS = 4
"""Runs that are read at once: on a network filesystem reading is mostly waiting."""
_END_BYTES, _EVENT_BYTES = 1 << 16, 1 << 13
"""Bytes read from the ends of metrics.jsonl, of some twenty rows, and of events.jsonl."""
_LAST_LINES = 8
"""Lines at the end of metrics.jsonl among which the last whole row is looked for."""
_HEAVY = ("policy", "state", "trainer", "critic", "reference")
"""Folders whose files are counted: nearly all bytes of a run are there."""
_HOURS = re.compile(rb'"slurm/gpu_hours/[^"]+": ([0-9.eE+-]+)')


@dataclass(frozen=True)
class Entry:
    """One run in a list. ``slurm-ppo ls --json`` prints these keys."""

    run: str
    """Run directory."""
    state: str
    """State as ``slurm-ppo status`` has it; also "not begun" (of a sweep) and "corrupt"."""
    name: str | None = None
    iteration: int | None = None
    """Newest iteration that has a row."""
    iterations: int | None = None
    reward: float | None = None
    """Mean reward of the newest row."""
    best: float | None = None
    """Best value so far of what evaluate.best names: by default of the mean reward on held-out prompts."""
    best_metric: str | None = None
    """Metric that ``best`` is a value of, where evaluate.best names another than that."""
    gpu_hours: float | None = None
    """Hours of all rows, as Slurm accounts for them; of more than some twenty rows estimated from the newest.
    None without accounting."""
    age: float | None = None
    """Seconds since the run was made."""
    idle: float | None = None
    """Seconds since its newest row, or since it was made."""
    bytes: int | None = None
    """Bytes of policies, critics and trainers' states; shards, logs and the rest are not counted."""
    sweep: str | None = None
    """Folder of the sweep that it belongs to."""
    note: str = ""
    """Reason why it cannot be read; of a run on Slurm that is another user's, or on another cluster, its
    owner."""


Who = Callable[[str], "Owner"]
"""Says who looks, and from which cluster: the one of a name, or with none that of this machine; asks Slurm
once."""


@dataclass(frozen=True)
class RunPlace:
    """A folder that is, or is to be, a run's."""

    root: Path
    sweep: Path | None = None


@dataclass(frozen=True)
class _Queued:
    """Run of which only Slurm's queue can say whether it is running."""

    id: str
    cluster: str
    """Name of the cluster that its settings give; else empty."""


LiveIds = Callable[[str], "Collection[str] | None"]
"""Asks a cluster, by its name or with none the one of this machine, for the ids of runs that have jobs in the
queue; None where it does not answer."""


def find_places(folder: Path) -> list[RunPlace]:
    """Find runs: the folder itself, those in it and one level below, and those of sweeps there; by name.

    Raises:
        UserError: it is no folder, or cannot be listed.
    """
    if not folder.is_dir():
        what = "a file" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {what}; give a run directory, or a folder that holds runs")
    return list(_places(folder, _LEVELS))


def _places(folder: Path, levels: int) -> Iterator[RunPlace]:
    if holds_identity(folder):
        yield RunPlace(folder)
    elif (folder / SWEEP_MANIFEST).exists():
        yield from _of_sweep(folder)
    elif levels:
        for child in _folders(folder):
            with contextlib.suppress(OSError):  # what may not be read holds no run that can be shown
                yield from list(_places(child, levels - 1))


def _of_sweep(root: Path) -> Iterator[RunPlace]:
    """Yield the runs of a sweep in its order, also those that have not begun; of a corrupt manifest those
    that are there."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        points = unsealed(read_plainly(root / SWEEP_MANIFEST))["points"]
        yield from [RunPlace(root / point["name"], root) for point in points]
        return
    yield from (RunPlace(path, root) for path in _folders(root) if holds_identity(path))


def _folders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return sorted(Path(e.path) for e in entries if not e.name.startswith(".") and _is_folder(e))


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    """Whether it is a folder, or a link to one that can be looked at: one to itself, for example, cannot."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def read_entries(places: Iterable[RunPlace], live_ids: LiveIds, now: float | None = None) -> list[Entry]:
    """Read all runs. Each cluster is asked once, and only if one of its runs may still be active."""
    now = time.time() if now is None else now

    @functools.cache
    def who(cluster: str) -> "Owner":
        from pipeline.run.owner import who_acts  # runs of this machine need nothing of Slurm's

        return who_acts(cluster)

    with ThreadPoolExecutor(_THREADS) as threads:
        found = list(threads.map(lambda place: _read(place, now, who), places))
    live = {cluster: live_ids(cluster) for cluster in {queued.cluster for _, queued in found if queued}}
    return [
        _with_queue(entry, queued.id, live[queued.cluster]) if queued else entry for entry, queued in found
    ]


def _with_queue(entry: Entry, run_id: str, live: Collection[str] | None) -> Entry:
    state = "unknown" if live is None else "running" if run_id in live else "stopped"
    return replace(entry, state=state)


def _read(place: RunPlace, now: float, who: Who) -> tuple[Entry, _Queued | None]:
    """Read one run; also return who it is where only Slurm's queue can say whether it is running."""
    root, sweep = str(place.root), str(place.sweep) if place.sweep else None
    try:
        if not holds_identity(place.root):
            return Entry(root, NOT_BEGUN, place.root.name, sweep=sweep), None
        return _read_run(RunPaths(place.root), sweep, now, who)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return Entry(root, CORRUPT, place.root.name, sweep=sweep, note=why), None


def _read_run(paths: RunPaths, sweep: str | None, now: float, who: Who) -> tuple[Entry, _Queued | None]:
    identity = from_json(_read_or_copy(paths.run_json, paths.run_copy))
    config = _read_or_copy(paths.config_yaml, paths.config_copy).decode()
    total = setting(config, "iterations")
    if not (total and setting(config, "scheduler", "kind")):
        raise ValueError("config.yaml has no iterations or no scheduler.kind")
    end = journal.read_end(paths.metrics, _END_BYTES)
    row = last_row(end)
    start = int((identity.get("parent") or {}).get("iteration", 0))
    done = int(row["iteration"]) if row else start
    best, metric = _best_of(paths)
    created = float(identity["created"])
    entry = Entry(
        run=str(paths.root),
        state="unknown",
        name=str(identity["name"]),
        iteration=done,
        iterations=int(total),
        reward=_number(row.get("reward/mean")),
        best=best,
        best_metric=metric,
        gpu_hours=_gpu_hours(end, row, done - start),
        age=now - created,
        idle=now - (paths.metrics.stat().st_mtime if row else created),
        bytes=sum(bytes_below(paths.root / parent) for parent in _HEAVY),
        sweep=sweep,
    )
    return _with_state(entry, identity, config, who, now)


def _with_state(
    entry: Entry, identity: Mapping[str, Any], config: str, who: Who, now: float
) -> tuple[Entry, _Queued | None]:
    """Add the state of a run, unless the queue has to be asked for it."""
    paths, total = RunPaths(Path(entry.run)), entry.iterations or 0
    is_done = (entry.iteration or 0) >= total
    if is_done and (setting(config, "evaluate", "command") in ("", "null") or _is_measured(paths, total)):
        return replace(entry, state="complete"), None
    run_id = str(identity["id"])
    is_copy = find_original(identity.get("root", ""), paths.root.absolute(), run_id) is not None
    if setting(config, "scheduler", "kind") == "slurm":
        cluster = setting(config, "scheduler", "options", "clusters").strip("'\"")
        return _on_slurm(entry, paths, _Queued(run_id, cluster), is_copy, now, who)
    holder = None if is_copy else holder_of(paths.locks)  # no process works on a copy
    state = machine_state(False, holder, journal.read_tail(paths.events, _EVENT_BYTES))
    return replace(entry, state=state), None


def _on_slurm(
    entry: Entry, paths: RunPaths, queued: _Queued, is_copy: bool, now: float, who: Who
) -> tuple[Entry, _Queued | None]:
    """Add the state of a run that is not complete, unless the queue has to be asked for it."""
    from pipeline.run.control import read_control
    from pipeline.run.standpoint import standpoint

    state = slurm_state(False, read_control(paths), False if is_copy else None)
    if state == "unknown" and (found := standpoint(paths, lambda: who(queued.cluster))):
        state = "running" if _is_heard_of(paths, now) else "unknown"
        return replace(entry, state=state, note=f"of {found.owner}"), None
    return replace(entry, state=state), queued if state == "unknown" else None


def setting(config: str, *keys: str) -> str:
    """Return the text of one setting in a config.yaml, of a mapping or list that of all of it; empty where it
    is not there. Parsing the file would take longer than everything else. Pure."""
    for depth, key in enumerate(keys):
        indent = "  " * depth
        found = re.search(rf"^{indent}{key}:(.*\n(?:{indent}[ -].*\n)*)", config, re.MULTILINE)
        config = found[1] if found else ""
    return config.strip()


def _is_measured(paths: RunPaths, last: int) -> bool:
    """Whether the last policy was measured, or left out: the others came before it; no row waits for it."""
    return is_there(paths.task(Task(last, Stage.BENCHMARK)).record)


def _is_heard_of(paths: RunPaths, now: float) -> bool:
    """Whether a worker of a run whose jobs are not seen here has just said something."""
    from pipeline.workers.beats import SILENT_SECONDS, folder_of

    with contextlib.suppress(OSError), os.scandir(folder_of(paths)) as found:
        return any(now - one.stat().st_mtime <= SILENT_SECONDS for one in found)
    return False


def _read_or_copy(path: Path, copy: Path) -> bytes:
    try:
        return read_plainly(path)
    except FileNotFoundError:
        return read_plainly(copy)


def last_row(end: bytes) -> Mapping[str, Any]:
    """Return the last whole row in the end of metrics.jsonl; empty without one.

    Raises:
        ValueError: its lines are no rows.
    """
    row = next(_rows(end), None)
    if row is None and end:
        raise ValueError("metrics.jsonl ends in no row")
    return row or {}


def _rows(text: bytes) -> Iterator[dict[str, Any]]:
    """Yield rows, newest first. A line that was cut by a crash is none."""
    for line in reversed(text.rsplit(b"\n", _LAST_LINES)):
        with contextlib.suppress(ValueError):
            row = from_json(line)
            if isinstance(row, dict) and isinstance(row.get("iteration"), int):
                yield row


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _best_of(paths: RunPaths) -> tuple[float | None, str | None]:
    """Return the best value, and its metric where best.json names one."""
    try:
        found = from_json(read_plainly(paths.best))
    except FileNotFoundError:
        return None, None
    metric = found.get("metric")
    return _number(found.get("reward")), metric if isinstance(metric, str) else None


def _gpu_hours(end: bytes, row: Mapping[str, Any], iterations: int) -> float | None:
    """Sum the hours of the rows in the end of metrics.jsonl; where that is not all of it, for all iterations
    at their pace. Without accounting the last row has none."""
    if not any(name.startswith("slurm/gpu_hours/") for name in row):
        return None
    begin = end.find(b"\n") + 1 if len(end) >= _END_BYTES else 0
    hours = sum(map(float, _HOURS.findall(end, begin)))  # parsing would take ten times as long
    return hours * max(1.0, iterations / max(1, end.count(b"\n", begin)))
