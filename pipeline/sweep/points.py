"""Points of a sweep with their configurations, and what a command adds to a sweep that is there."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from pipeline.config.compose import compose, from_mapping, to_mapping
from pipeline.config.resolve import resolve
from pipeline.config.schema import Config
from pipeline.run.directory import RunError, check_is_free, is_run, version
from pipeline.run.paths import RunPaths
from pipeline.sweep.grid import Grid, SweepError, fixed_differences
from pipeline.sweep.manifest import MANIFEST, Point, Sweep
from pipeline.sweep.naming import LONGEST, in_words, point_name, tags_of

_WITHOUT_EFFECT = ("name", "run_dir", "tracking", "notify")
"""Keys that a point's results do not depend on."""
_LONGEST_NAME = 50
_TAG, _JOB_TYPE, _DISPLAY = 64, 64, 128
"""Most characters of W&B's tags, job types, and of names and groups."""


@dataclass(frozen=True)
class Draft:
    """A point that a command asks for."""

    settings: dict[str, str]
    config: Config

    @property
    def key(self) -> str:
        """Hash of the settings that matter for the result."""
        mapping = {k: v for k, v in to_mapping(self.config).items() if k not in _WITHOUT_EFFECT}
        return xxhash.xxh3_128_hexdigest(json.dumps(mapping, sort_keys=True).encode())


def drafts_of(grid: Grid, config_dir: Path | None) -> list[Draft]:
    """Compose and check the configuration of every point. Those with the same settings come once.

    Raises:
        ConfigError: a setting is wrong.
        SweepError: points would lie in different folders.
    """
    found: dict[str, Draft] = {}
    for settings, words in grid.points():
        draft = Draft(settings, resolve(compose([*grid.fixed, *words], config_dir)))
        found.setdefault(draft.key, draft)
    drafts = list(found.values())
    if len({draft.config.run_dir for draft in drafts}) > 1:
        raise SweepError("run_dir= is the sweep's folder, so it must not depend on the keys that are swept")
    if len(name := drafts[0].config.name) > _LONGEST_NAME:
        raise SweepError(f"name={name}: a sweep's name has {_LONGEST_NAME} characters at most")
    return drafts


def config_of(root: Path, point: Point) -> Config:
    """Return a point's configuration. Its run lies below ``root``, wherever the sweep was made."""
    return from_mapping({**point.config, "run_dir": str(run_folder(root, point))})


def run_folder(root: Path, point: Point) -> Path:
    return root.absolute() / point.name


def has_begun(root: Path, point: Point) -> bool:
    """Whether the point's run can no longer be started over with other settings."""
    try:
        check_is_free(RunPaths(run_folder(root, point)))
    except RunError:
        return True
    return False


def check_folder(root: Path) -> None:
    """Refuse a folder where no sweep may begin. Raises SweepError."""
    other = "choose another name=... or run_dir=..."
    if is_run(root):
        raise SweepError(f"{root} holds a run, so a sweep cannot begin there; {other}")
    if root.exists() and not root.is_dir():
        raise SweepError(f"{root} is no folder; {other}")
    names = {path.name for path in root.glob("[!.]*")} if root.is_dir() else set()
    if names - {"locks", "logs"}:
        raise SweepError(f"{root} holds other files and no {MANIFEST}; {other}")


def extended(root: Path, before: Sweep | None, grid: Grid, drafts: Sequence[Draft], folder: str) -> Sweep:
    """Return the sweep with the points that a command asks for; those that it has stay as they are.

    Points that have not begun take changed settings.

    Args:
        folder: where rules are imported from, of a new sweep.

    Raises:
        SweepError: runs that have begun would have other settings.
    """
    name = drafts[0].config.name
    if before is not None:
        before = _with_same_settings(root, before, grid)
    sweep = before or Sweep(name, time.time(), version(), folder, grid.fixed, ())
    points = {point.key: point for point in sweep.points}
    for draft in drafts:
        if (key := draft.key) in points:
            continue
        same = next((p for p in points.values() if dict(p.settings) == draft.settings), None)
        if same is not None:
            _check_not_begun(root, same)
            del points[same.key]
        taken = {point.name for point in points.values()}
        points[key] = _point(root, sweep.name, draft, key, taken)
    return replace(sweep, points=tuple(points.values()))


def _with_same_settings(root: Path, before: Sweep, grid: Grid) -> Sweep | None:
    """Return the sweep; None where it has other fixed settings and nothing of it has begun."""
    keys = fixed_differences(before.fixed, grid.fixed, {*before.keys, *grid.keys, "run_dir"})
    if not keys:
        return before
    begun = [point for point in before.points if has_begun(root, point)]
    if not begun:
        return None
    raise SweepError(
        f"{root} holds a sweep with other fixed settings ({', '.join(keys)}), and {len(begun)} of its runs "
        "have begun; give the same settings, or choose another name=..."
    )


def _check_not_begun(root: Path, point: Point) -> None:
    if has_begun(root, point):
        raise SweepError(
            f"{run_folder(root, point)} has begun with other settings than the same words give now: a file "
            "of settings has changed; choose another name=... for the new ones, or take that change back"
        )


def _point(root: Path, sweep: str, draft: Draft, key: str, taken: set[str]) -> Point:
    name = point_name(draft.settings, taken, LONGEST - len(sweep) - 1)
    config = replace(draft.config, name=f"{sweep}-{name}", run_dir=str(root / name))
    wandb = config.tracking.wandb
    point = Point(name, draft.settings, key, {})
    wandb = replace(
        wandb,
        name=wandb.name or f"{sweep}: {in_words(draft.settings)}"[:_DISPLAY],
        group=wandb.group or sweep,
        job_type=wandb.job_type or point.group[:_JOB_TYPE] or None,
        tags=tuple(dict.fromkeys([*wandb.tags, *tags_of(draft.settings, _TAG)])),
    )
    config = replace(config, tracking=replace(config.tracking, wandb=wandb))
    return replace(point, config=to_mapping(config))
