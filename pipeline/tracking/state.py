"""Local knowledge of which rows W&B has of a run: two small files in ``<run>/wandb``.

Offline, ``offline.json`` is to W&B's segments (folders, one per opening of the run) what a commit record is
to a shard: a segment counts if and only if it is named there, which happens once it was closed. What a killed
writer left is not named, is removed, and its rows are written again. Online the server knows what it has;
``online.json`` remembers what may have reached it, so that rows that were taken back are noticed.
"""

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pipeline.config.conversion import converted
from pipeline.run.directory import Run
from pipeline.run.durable import replace_durably
from pipeline.run.lease import hold
from pipeline.run.paths import RunPaths
from pipeline.run.wandb_place import WandbPlace
from slurm.sealing import from_json
from slurm.sharedfiles import read_newest

_PATIENCE = 60.0
"""Seconds to wait for a writer that is about to close."""
_MANY_SEGMENTS = 24
"""Number of segments at which they are merged: each is six files, a run of days has hundreds of drivers."""

State = TypeVar("State", "Offline", "Online")


@dataclass(frozen=True)
class Offline:
    """Offline segments that count."""

    segments: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of the folder -> iterations whose rows it holds."""

    @property
    def iterations(self) -> frozenset[int]:
        return frozenset(i for held in self.segments.values() for i in held)

    def excess(self, paths: RunPaths) -> "Offline":
        """Return the segments to merge into one, if there are many; never one that was uploaded."""
        loose = {name: held for name, held in self.segments.items() if not synced_marks(paths.wandb / name)}
        return Offline(loose if len(loose) >= _MANY_SEGMENTS else {})


@dataclass(frozen=True)
class Online:
    """Rows that may have reached the server."""

    generation: int = 1
    """Number of the W&B run: it cannot take rows back, so once some were, or on request, another gets all."""
    sent: int = 0
    """Newest iteration whose row may be on the server; written before it is sent."""
    arrived: int = 0
    """Iteration up to which the server has confirmed every row."""
    measured: int = 0
    """Number of lines of evaluate.command's numbers that the server has confirmed."""
    place: WandbPlace | None = None
    """Place that counts instead of that of ``run.json``: with the entity of the first key, or as
    ``sync --anew`` chose it."""


def read_offline(paths: RunPaths) -> Offline:
    return _read(paths.wandb_offline, Offline)


def read_online(paths: RunPaths) -> Online:
    return _read(paths.wandb_online, Online)


def write_state(paths: RunPaths, state: Offline | Online) -> None:
    path = paths.wandb_offline if isinstance(state, Offline) else paths.wandb_online
    path.parent.mkdir(exist_ok=True)
    said = {key: value for key, value in asdict(state).items() if value or key not in ("measured", "place")}
    replace_durably(path, json.dumps(said) + "\n")


def _read(path: Path, kind: type[State]) -> State:
    """Read a state; a file that is missing or cannot be understood counts as one without rows."""
    try:
        return converted(kind, from_json(read_newest(path)))
    except (FileNotFoundError, ValueError):
        return kind()


def wandb_id(run: Run) -> str:
    """Return the run's id on W&B: its own, with the generation where that is not the first."""
    generation = read_online(run.paths).generation
    return run.identity.id if generation == 1 else f"{run.identity.id}-{generation}"


def segment_folders(paths: RunPaths) -> list[Path]:
    """List W&B's offline segments on the disk, oldest first."""
    return sorted(paths.wandb.glob("offline-run-*"))


def synced_marks(segment: Path) -> list[Path]:
    """List the marks that ``wandb sync`` leaves in a segment that it has uploaded."""
    return list(segment.glob("run-*.wandb.synced"))


def mark_synced(segment: Path) -> None:
    """Make ``wandb sync`` skip the segment: W&B has its rows."""
    for data in segment.glob("run-*.wandb"):
        data.with_name(f"{data.name}.synced").touch()


def remove_unlisted(paths: RunPaths, listed: Collection[str]) -> int:
    """Remove segments that do not count. Returns how many there were. Only for the holder of the lease."""
    loose = [folder for folder in segment_folders(paths) if folder.name not in listed]
    for folder in loose:
        shutil.rmtree(folder)
    return len(loose)


def offline_lease(paths: RunPaths) -> Path:
    """Return where the one writer of offline segments holds its lease."""
    return paths.locks / "wandb-offline"


def online_lease(paths: RunPaths) -> Path:
    """Return where the one writer to the server holds its lease."""
    return paths.locks / "wandb-online"


def forget_rows(paths: RunPaths, place: WandbPlace | None = None) -> None:
    """Forget every row, so that all are written again, on the server to another W&B run.

    Args:
        place: the place of that run; None: the same as before.
    """
    with hold(offline_lease(paths), _PATIENCE), hold(online_lease(paths), _PATIENCE):
        before = read_online(paths)
        write_state(paths, Online(before.generation + 1, place=place or before.place))
        write_state(paths, Offline())


def rewind_measured(paths: RunPaths) -> None:
    """Take back numbers of evaluate.command, where W&B may have any. Raises LeaseHeld after a minute."""
    if read_online(paths).sent or read_offline(paths).segments:
        forget_rows(paths)


def rewind(paths: RunPaths, iteration: int) -> None:
    """Take back the rows after ``iteration``, where W&B has any. Raises LeaseHeld after a minute."""
    offline = read_offline(paths)
    uploaded = (held for name, held in offline.segments.items() if synced_marks(paths.wandb / name))
    if max([read_online(paths).sent, *(i for held in uploaded for i in held)]) > iteration:
        forget_rows(paths)
    elif max(offline.iterations, default=0) > iteration:
        with hold(offline_lease(paths), _PATIENCE):
            write_state(paths, Offline())


def with_segment(
    offline: Offline, name: str, iterations: Collection[int], without: Collection[str]
) -> Offline:
    """Add a closed segment that replaces those in ``without``. Pure."""
    kept = {other: held for other, held in offline.segments.items() if other not in without}
    return replace(offline, segments={**kept, name: tuple(iterations)})
