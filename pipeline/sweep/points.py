"""Points of a sweep with their configurations, and what a command adds to a sweep that is there."""

import contextlib
import json
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from pipeline.config.compose import from_mapping, to_mapping
from pipeline.config.evaluate import HELDOUT_REWARD, Best, EvaluateConfig
from pipeline.config.findings import Findings
from pipeline.config.hardware import as_decided
from pipeline.config.issue import ConfigError
from pipeline.config.resolve import configure
from pipeline.config.schema import Config
from pipeline.run.directory import check_is_free, check_is_outside_runs, is_run, load_run
from pipeline.run.identity import RunError, version
from pipeline.run.paths import SWEEP_MANIFEST, RunPaths
from pipeline.sweep.grid import Grid, SweepError, fixed_differences
from pipeline.sweep.manifest import Sweep, SweepPoint
from pipeline.sweep.naming import LONGEST, in_words, limited, point_name, tags_of

_WITHOUT_EFFECT = ("name", "run_dir", "tracking", "notify")
"""Keys that a point's results do not depend on."""
_UPDATE_WITHOUT_EFFECT = ("keep_shards_last",)
"""The same below update."""
_LONGEST_NAME = 50
_TAG, _JOB_TYPE, _DISPLAY = 64, 64, 128
"""Most characters of W&B's tags, job types, and of names and groups."""


@dataclass(frozen=True)
class Draft:
    """A point that a command asks for."""

    settings: dict[str, str]
    config: Config
    decided: str = ""
    """Line on what was decided of settings that are auto."""
    auto: tuple[str, ...] = ()
    """Keys of these settings."""

    @property
    def key(self) -> str:
        return key_of(self.config)


def key_of(config: Config) -> str:
    """Hash the settings that matter for the result: the same for the same point, by one version of slurm-ppo.

    It is computed where it is wanted, never saved: to another version settings have keys that this one lacks.
    """
    mapping = {k: v for k, v in to_mapping(config).items() if k not in _WITHOUT_EFFECT}
    mapping["update"] = {k: v for k, v in mapping["update"].items() if k not in _UPDATE_WITHOUT_EFFECT}
    return xxhash.xxh3_128_hexdigest(json.dumps(mapping, sort_keys=True).encode())


def drafts_of(grid: Grid, config_dir: Path | None) -> list[Draft]:
    """Compose and check the configuration of every point. Those with the same settings come once.

    Raises:
        ConfigError: a setting is wrong.
        SweepError: points would lie in different folders.
    """
    found: dict[str, Draft] = {}
    for settings, words in grid.points():
        problems = Findings()
        config = configure([*grid.fixed, *words], config_dir, found=problems)
        draft = Draft(settings, config, problems.decided, problems.auto)
        found.setdefault(draft.key, draft)
    drafts = list(found.values())
    if len({draft.config.run_dir for draft in drafts}) > 1:
        raise SweepError("run_dir= is the sweep's folder, so it must not depend on the keys that are swept")
    if len(name := drafts[0].config.name) > _LONGEST_NAME:
        raise SweepError(f"name={name}: a sweep's name has {_LONGEST_NAME} characters at most")
    return drafts


def as_begun(root: Path, before: Sweep | None, drafts: Sequence[Draft]) -> list[Draft]:
    """Return drafts; those that a sweep has, of which a run has begun, with what was decided then of settings
    that are auto, whatever would be decided now.

    Args:
        before: the sweep as it is; None where there is none.
    """
    points = before.points if before else ()
    if not any(has_begun(root, point) for point in points):
        return list(drafts)
    known = {key_of(config): config for config in (config_of(root, point) for point in points)}

    def kept(draft: Draft) -> Draft:
        if not draft.auto or draft.key in known:
            return draft
        decided = (as_decided(draft.config, draft.auto, one) for one in known.values())
        same = (replace(draft, config=config, decided="") for config in decided)
        return next((one for one in same if one.key in known), draft)

    return list(map(kept, drafts))


def config_of(root: Path, point: SweepPoint) -> Config:
    """Return a point's configuration, with the keys that this version has added since it was saved. Its run
    lies below ``root``, wherever the sweep was made.

    Raises:
        SweepError: another version of slurm-ppo saved it, with settings that this one does not know.
    """
    try:
        return from_mapping({**point.config, "run_dir": str(run_folder(root, point))})
    except ConfigError as error:
        why = f"{root / SWEEP_MANIFEST}: the settings of {point.name} are of another version of slurm-ppo"
        raise SweepError(f"{why}: {error}") from None


def run_folder(root: Path, point: SweepPoint) -> Path:
    return root.absolute() / point.name


def has_begun(root: Path, point: SweepPoint) -> bool:
    """Whether the point's run can no longer be started over with other settings."""
    try:
        check_is_free(RunPaths(run_folder(root, point)))
    except RunError:
        return True
    return False


def check_folder(root: Path) -> None:
    """Refuse a folder where no sweep may begin. Raises SweepError; RunError inside a run's directory."""
    other = "choose another name=... or run_dir=..."
    if is_run(root):
        raise SweepError(f"{root} holds a run, so a sweep cannot begin there; {other}")
    check_is_outside_runs(root)
    if root.exists() and not root.is_dir():
        raise SweepError(f"{root} is not a folder; {other}")
    names = {path.name for path in root.glob("[!.]*")} if root.is_dir() else set()
    if names - {"locks", "logs"}:
        raise SweepError(f"{root} holds other files and no {SWEEP_MANIFEST}; {other}")


def extended(root: Path, before: Sweep | None, grid: Grid, drafts: Sequence[Draft], folder: str) -> Sweep:
    """Return the sweep with the points that a command asks for; those that it has stay as they are.

    One of which nothing has begun is made again where its settings have changed. A point that was dropped
    comes back with its run, if it is to have the same settings; others never lie in its folder.

    Args:
        folder: where rules are imported from, of a new sweep.

    Raises:
        SweepError: runs that have begun would have other settings.
    """
    if before is not None and (changed := _changed(root, before, grid, drafts)):
        begun = sum(has_begun(root, point) for point in before.points)
        if begun:
            raise SweepError(
                f"{root} holds a sweep with other settings ({', '.join(changed)[:100]}), and {begun} of its "
                "runs have begun; give the same settings, take back what was changed in a file of settings, "
                "or choose another name=..."
            )
        before = None
    sweep = before or Sweep(drafts[0].config.name, time.time(), version(), folder, grid.fixed, ())
    points = {key_of(config_of(root, point)): point for point in sweep.points}
    keys = (*sweep.keys, *grid.keys)
    for draft in drafts:
        if (key := draft.key) not in points:
            taken = {point.name for point in points.values()}
            points[key] = _point(sweep.name, root / _name_of(root, sweep.name, draft, taken), draft, keys)
    return replace(sweep, points=tuple(points.values()))


def _changed(root: Path, before: Sweep, grid: Grid, drafts: Sequence[Draft]) -> list[str]:
    """Return the keys that have other values for all runs; else the runs whose words give other settings than
    before, as a file of settings, or a default, has changed."""
    asked = {frozenset(draft.settings.items()): draft.key for draft in drafts}
    keys = fixed_differences(before.fixed, grid.fixed, {*before.keys, *grid.keys, "run_dir"})
    return keys or [
        point.name
        for point in before.points
        if asked.get(frozenset(point.settings.items()), key := key_of(config_of(root, point))) != key
    ]


def _name_of(root: Path, sweep: str, draft: Draft, taken: Collection[str]) -> str:
    """Return the name of a new point: one that no other has, and whose folder holds no run that was dropped,
    or the very run that is asked for."""
    key = draft.key
    return point_name(
        draft.settings, taken, LONGEST - len(sweep) - 1, lambda name: _may_lie_in(root / name, key)
    )


def _may_lie_in(folder: Path, key: str) -> bool:
    """Whether a run of these settings may begin in a folder, or is there already."""
    try:
        check_is_free(RunPaths(folder))
        return True
    except RunError:
        with contextlib.suppress(RunError):  # something else, or a run that is spoilt: it stays untouched
            return key_of(load_run(folder, settings=0).config) == key
    return False


def _point(sweep: str, folder: Path, draft: Draft, keys: Collection[str]) -> SweepPoint:
    """Return a point.

    Args:
        sweep: the sweep's name.
        folder: folder of its run.
        keys: all keys that are swept: names of its settings differ from theirs.
    """
    config = replace(draft.config, name=f"{sweep}-{folder.name}", run_dir=str(folder))
    point, wandb = SweepPoint(folder.name, draft.settings, {}), config.tracking.wandb
    wandb = replace(
        wandb,
        name=wandb.name or f"{sweep}: {in_words(point.settings, keys)}"[:_DISPLAY],
        group=wandb.group or sweep,
        job_type=wandb.job_type or limited(in_words(point.without_seed, keys), _JOB_TYPE) or None,
        tags=tuple(dict.fromkeys([*wandb.tags, *tags_of(point.settings, _TAG, keys)])),
    )
    config = replace(config, tracking=replace(config.tracking, wandb=wandb))
    return replace(point, config=to_mapping(config))


# --- what runs are compared by ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """Number by which runs choose their best policy."""

    metric: str
    is_lowest_best: bool

    @property
    def title(self) -> str:
        return "held-out reward" if self.metric == HELDOUT_REWARD else self.metric

    @property
    def in_words(self) -> str:
        """What groups are ordered by."""
        what = "reward on held-out prompts" if self.metric == HELDOUT_REWARD else self.metric
        return f"{what}{', the lowest first,' if self.is_lowest_best else ''} where there is one"


def measure_of(given: Iterable[EvaluateConfig]) -> Measure | None:
    """Return the measure of the best policy that all of them name; None where they differ. Pure."""
    found = {Measure(one.best, one.best_is is Best.LOWEST) for one in given}
    return found.pop() if len(found) == 1 else None
