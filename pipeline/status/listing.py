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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.run import journal
from pipeline.run.lease import holder_of
from pipeline.run.originals import find_original
from pipeline.run.paths import SWEEP_MANIFEST, RunPaths, holds_identity
from pipeline.run.sizes import bytes_below
from pipeline.run.tasks import Stage, Task
from slurm.errors import UserError
from slurm.sealing import from_json, unsealed
from slurm.sharedfiles import is_there, opened_file, read_plainly

if TYPE_CHECKING:
    from pipeline.run.owner import Owner

SPOILT, NOT_BEGUN = "spoilt", "not begun"
_THREADS = 4
"""Runs that are read at once: on a network filesystem reading is mostly waiting."""
_END_BYTES, _EVENT_BYTES = 1 << 16, 1 << 13
"""Bytes read from the ends of metrics.jsonl, of some twenty rows, and of events.jsonl."""
_LAST_LINES = 8
"""Lines at the end of metrics.jsonl among which the last whole row is looked for."""
_HEAVY = ("policy", "state", "trainer", "critic")
"""Folders whose files are counted: nearly all bytes of a run are there."""
_ITERATIONS = re.compile(rb"^iterations: (\d+)$", re.MULTILINE)
_SCHEDULER = re.compile(rb"^scheduler:\n(?: .*\n)*?  kind: (\w+)$", re.MULTILINE)
_CLUSTER = re.compile(
    rb"^scheduler:\n(?: .*\n)*?  options:\n(?:    .*\n)*?    clusters: (\S+)$", re.MULTILINE
)
_PROGRAM = re.compile(rb"^evaluate:\n(?: .*\n)*?  command:\n", re.MULTILINE)
"""Beginning of evaluate.command, which is a list, or null in the same line."""
_HOURS = re.compile(rb'"slurm/gpu_hours/[^"]+": ([0-9.eE+-]+)')


@dataclass(frozen=True)
class Entry:
    """One run in a list. ``slurm-ppo ls --json`` prints these keys."""

    run: str
    """Run directory."""
    state: str
    """State as ``slurm-ppo status`` has it; also "not begun" (of a sweep) and "spoilt"."""
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
    None where nobody accounts for them."""
    age: float | None = None
    """Seconds since the run was made."""
    idle: float | None = None
    """Seconds since its newest row, or since it was made."""
    bytes: int | None = None
    """Bytes of policies, critics and trainers' states; shards, logs and the rest are not counted."""
    sweep: str | None = None
    """Folder of the sweep that it belongs to."""
    note: str = ""
    """Reason why it cannot be read; of a run on Slurm that is somebody else's, or on another cluster, whose
    it is."""


Who = Callable[[str], "Owner"]
"""Says who looks, and from which cluster: the one of a name, or with none that of this machine; asks Slurm
once."""


@dataclass(frozen=True)
class Place:
    """A folder that is, or is to be, a run's."""

    root: Path
    sweep: Path | None = None


LiveIds = Callable[[str], "Collection[str] | None"]
"""Asks a cluster, by its name or with none the one of this machine, for the ids of runs that have jobs in the
queue; None where it does not answer."""


@dataclass(frozen=True)
class _Queued:
    """Run of which only Slurm's queue can say whether it is running."""

    id: str
    cluster: str
    """Name of the cluster that its settings give; else empty."""


def find_places(folder: Path) -> list[Place]:
    """Find runs: the folder itself, those in it, and those one level below, such as a sweep's; by name.

    Raises:
        UserError: it is no folder, or cannot be listed.
    """
    if not folder.is_dir():
        what = "a file" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {what}; give a run directory, or a folder that holds runs")
    if holds_identity(folder):
        return [Place(folder)]
    if (folder / SWEEP_MANIFEST).exists():
        return list(_of_sweep(folder))
    return [place for child in _folders(folder) for place in _below(child)]


def _below(child: Path) -> Iterator[Place]:
    try:
        if holds_identity(child):
            yield Place(child)
        elif (child / SWEEP_MANIFEST).exists():
            yield from _of_sweep(child)
        else:
            yield from (Place(path) for path in _folders(child) if holds_identity(path))
    except OSError:  # a folder that may not be looked into is nobody's run that we could show
        return


def _of_sweep(root: Path) -> Iterator[Place]:
    """Yield the runs of a sweep in its order, also those that have not begun; of a spoilt manifest those that
    are there."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        points = unsealed(read_plainly(root / SWEEP_MANIFEST))["points"]
        yield from [Place(root / point["name"], root) for point in points]
        return
    yield from (Place(path, root) for path in _folders(root) if holds_identity(path))


def _folders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return sorted(Path(e.path) for e in entries if not e.name.startswith(".") and _is_folder(e))


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    """Whether it is a folder, or a link to one that can be looked at: one to itself, for example, cannot."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def read_entries(places: Iterable[Place], live_ids: LiveIds, now: float | None = None) -> list[Entry]:
    """Read all runs. Each cluster is asked once, and only if one of its runs may still be at work."""
    now = time.time() if now is None else now

    @functools.cache
    def who(cluster: str) -> "Owner":
        from pipeline.run.owner import who_acts  # runs of this machine need nothing of Slurm's

        return who_acts(cluster)

    with ThreadPoolExecutor(_THREADS) as threads:
        found = list(threads.map(lambda place: _read(place, now, who), places))
    clusters = {queued.cluster for _, queued in found if queued is not None}
    live = {cluster: live_ids(cluster) for cluster in clusters}
    return [entry if one is None else _with_queue(entry, one.id, live[one.cluster]) for entry, one in found]


def _with_queue(entry: Entry, run_id: str, live: Collection[str] | None) -> Entry:
    state = "unknown" if live is None else "running" if run_id in live else "stopped"
    return Entry(**asdict(entry) | {"state": state})


def _read(place: Place, now: float, who: Who) -> tuple[Entry, _Queued | None]:
    """Read one run; also return who it is where only Slurm's queue can say whether it is running."""
    root, sweep = str(place.root), str(place.sweep) if place.sweep else None
    try:
        paths = RunPaths(place.root)
        if not holds_identity(place.root):
            return Entry(root, NOT_BEGUN, place.root.name, sweep=sweep), None
        return _read_run(paths, sweep, now, who)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return Entry(root, SPOILT, place.root.name, sweep=sweep, note=why), None


def _read_run(paths: RunPaths, sweep: str | None, now: float, who: Who) -> tuple[Entry, _Queued | None]:
    identity = from_json(_read_or_copy(paths.run_json, paths.run_copy))
    config = _read_or_copy(paths.config_yaml, paths.config_copy)
    total, is_on_slurm, has_program = _plan_of(config)
    end = read_end(paths.metrics, _END_BYTES)
    row = last_row(end)
    start = int((identity.get("parent") or {}).get("iteration", 0))
    done = int(row["iteration"]) if row else start
    is_done = done >= total and (not has_program or _is_measured(paths, total))
    is_copy = find_original(identity.get("root", ""), paths.root.absolute(), str(identity["id"])) is not None
    state, note = _state_of(paths, is_done, is_on_slurm, is_copy), ""
    if state is None and (owner := _other_owner(paths, who, _cluster_of(config))):
        state, note = _seen_from_elsewhere(paths, now), f"of {owner}"
    best, metric = _best_of(paths)
    written = paths.metrics.stat().st_mtime if row else float(identity["created"])
    entry = Entry(
        run=str(paths.root),
        state=state or "unknown",
        name=str(identity["name"]),
        iteration=done,
        iterations=total,
        reward=_number(row.get("reward/mean")),
        best=best,
        best_metric=metric,
        gpu_hours=_gpu_hours(end, row, done - start),
        age=now - float(identity["created"]),
        idle=now - written,
        bytes=_bytes_of(paths),
        sweep=sweep,
        note=note,
    )
    return entry, None if state else _Queued(str(identity["id"]), _cluster_of(config))


def _plan_of(config: bytes) -> tuple[int, bool, bool]:
    """Return the number of iterations, whether tasks are Slurm's, and whether a program measures policies,
    from the text of config.yaml: parsing all of it would take longer than everything else."""
    iterations, scheduler = _ITERATIONS.search(config), _SCHEDULER.search(config)
    if iterations is None or scheduler is None:
        raise ValueError("config.yaml has no iterations or no scheduler.kind")
    return int(iterations[1]), scheduler[1] == b"slurm", _PROGRAM.search(config) is not None


def _cluster_of(config: bytes) -> str:
    found = _CLUSTER.search(config)
    return found[1].decode().strip("'\"") if found else ""


def _is_measured(paths: RunPaths, last: int) -> bool:
    """Whether the last policy was measured, or left out: the others came before it; no row waits for it."""
    return is_there(paths.task(Task(last, Stage.BENCHMARK)).record)


def _read_or_copy(path: Path, copy: Path) -> bytes:
    try:
        return read_plainly(path)
    except FileNotFoundError:
        return read_plainly(copy)


def _state_of(paths: RunPaths, is_complete: bool, is_on_slurm: bool, is_copy: bool) -> str | None:
    """Return the run's state; None where Slurm's queue has to be asked. Nobody is at work on a copy."""
    if is_complete:
        return "complete"
    if is_on_slurm:
        return _requested(paths) or ("stopped" if is_copy else None)
    if not is_copy and holder_of(paths.locks):
        return "running"
    events = journal.read_tail(paths.events, _EVENT_BYTES)
    moves = [e for e in events if e.get("event") in ("driver_started", "driver_ended", "went_back")]
    has_failed = bool(moves) and moves[-1]["event"] == "driver_ended" and moves[-1].get("outcome") == "failed"
    return "failed" if has_failed else "incomplete"


def _requested(paths: RunPaths) -> str | None:
    """Return what people's requests of a run on Slurm say; None where it should be in the queue."""
    try:
        control = unsealed(read_plainly(paths.control))
    except FileNotFoundError:
        return None
    if control.get("cancelled"):
        return "paused" if control.get("paused") else "cancelled"
    return "failed" if control.get("has_failed") else None


def _other_owner(paths: RunPaths, who: Who, cluster: str) -> "Owner | None":
    """Return the owner of a run on Slurm whose jobs are not seen here; None of one's own."""
    from pipeline.run.standpoint import standpoint

    found = standpoint(paths, lambda: who(cluster))
    return found.owner if found else None


def _seen_from_elsewhere(paths: RunPaths, now: float) -> str:
    """Return the state of a run whose jobs are not seen here, by when its workers last said something."""
    from pipeline.workers.beats import folder_of
    from pipeline.workers.living import SILENT_SECONDS

    with contextlib.suppress(OSError), os.scandir(folder_of(paths)) as found:
        if any(now - one.stat().st_mtime <= SILENT_SECONDS for one in found):
            return "running"
    return "unknown"


def read_end(path: Path, num_bytes: int) -> bytes:
    """Return the last bytes of a file; none where there is no file."""
    try:
        with opened_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
            return file.read()
    except FileNotFoundError:
        return b""


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
    at their pace. Where the last row has none, nobody accounts for them."""
    if not any(name.startswith("slurm/gpu_hours/") for name in row):
        return None
    begin = end.find(b"\n") + 1 if len(end) >= _END_BYTES else 0
    hours = sum(map(float, _HOURS.findall(end, begin)))  # parsing would take ten times as long
    return hours * max(1.0, iterations / max(1, end.count(b"\n", begin)))


def _bytes_of(paths: RunPaths) -> int:
    """Sum the files in the heavy folders; what goes away meanwhile counts nothing."""
    return sum(bytes_below(paths.root / parent) for parent in _HEAVY)
