"""The manifest of a sweep: ``SWEEP/sweep.json`` says which runs it has, and with which settings.

It says nothing of how far they are: that is on disk in each run's directory, ``SWEEP/POINT``. So it is
written only when a sweep is made or extended, in one step, by the holder of the lease in ``SWEEP/locks``. A
checksum says whether a bit of it has flipped since: a run would have other settings than its words say.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.run.durable import replace_durably
from pipeline.run.paths import SWEEP_MANIFEST
from pipeline.sweep.grid import SEED, SweepError
from slurm.sharedfiles import checksum, is_there, make_folder, read_newest, unsealed

FORMAT = 1


@dataclass(frozen=True)
class SweepPoint:
    """One run of a sweep."""

    name: str
    """Name of its folder below the sweep's."""
    settings: Mapping[str, str]
    """Values of the keys that are swept, as the command line takes them."""
    config: Mapping[str, Any]
    """Resolved configuration, as config.yaml holds it."""

    @property
    def without_seed(self) -> dict[str, str]:
        """Settings but for the seed; none where only the seed is swept."""
        return {key: value for key, value in self.settings.items() if key != SEED}


@dataclass(frozen=True)
class Sweep:
    """Content of a manifest."""

    name: str
    created: float
    """Unix time."""
    version: str
    """Version of slurm-ppo that made it."""
    folder: str
    """Folder it was started in, where rules are imported from."""
    fixed: tuple[str, ...]
    """Words of the settings that all points share."""
    points: tuple[SweepPoint, ...]
    format: int = FORMAT

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that are swept."""
        return tuple(dict.fromkeys(key for point in self.points for key in point.settings))

    def point(self, name: str) -> SweepPoint:
        """Return the point of this name. Raises SweepError where there is none."""
        for point in self.points:
            if point.name == name:
                return point
        raise SweepError(f"the sweep {self.name} has no run {name!r}; it has: {', '.join(self.names)}"[:280])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(point.name for point in self.points)


def is_sweep(root: Path) -> bool:
    """Whether the directory holds a sweep."""
    return is_there(root / SWEEP_MANIFEST)


def locks_of(root: Path) -> Path:
    return root / "locks"


def log_of(root: Path, point: SweepPoint) -> Path:
    """Return the file of what the command that carries out a point prints."""
    return root / "logs" / f"{point.name}.log"


def read_sweep(root: Path) -> Sweep:
    """Read the manifest of a sweep.

    Raises:
        SweepError: there is none, or it was changed or cannot be read, or a later version wrote it.
    """
    path = root / SWEEP_MANIFEST
    try:
        content = unsealed(read_newest(path))
        if content["format"] > FORMAT:
            raise SweepError(f"{path} has format {content['format']}; go on with the version that wrote it")
        points = tuple(SweepPoint(**point) for point in content.pop("points"))
        return Sweep(**content | {"points": points, "fixed": tuple(content["fixed"])})
    except FileNotFoundError:
        raise SweepError(
            f"{root} holds no sweep: there is no {SWEEP_MANIFEST}; begin one with slurm-ppo sweep"
        ) from None
    except SweepError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise SweepError(
            f"{path} cannot be read ({why}); its runs are whole, and go on by slurm-ppo resume RUN"
        ) from None


def write_sweep(root: Path, sweep: Sweep) -> None:
    """Write the manifest, with its checksum, in one step. For the holder of the lease."""
    make_folder(root)
    content = asdict(sweep)
    sealed = {**content, "checksum": checksum(content)}
    replace_durably(root / SWEEP_MANIFEST, json.dumps(sealed, indent=1) + "\n")


def without(sweep: Sweep, name: str) -> Sweep:
    """Return the sweep without a point. Raises SweepError where there is none of this name."""
    gone = sweep.point(name)
    return replace(sweep, points=tuple(point for point in sweep.points if point is not gone))
