"""Changes of a run's settings while it goes on: ``settings.json``, kept twice.

config.yaml stays as it was frozen. Each change is noted beside it, and opening the run applies them in
their order. The holder of the run's lease writes the file, in one step, so that no change is lost or half
there. A worker goes on with the number of changes that it began with.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.config.changeable import Difference, applied, value_in_words
from pipeline.config.compose import from_mapping, to_mapping
from pipeline.config.conversion import converted
from pipeline.config.schema import Config
from pipeline.run.identity import RunError
from pipeline.run.paths import RunPaths
from pipeline.run.twofold import read_either, why_spoilt, write_both
from pipeline.text import moment


@dataclass(frozen=True)
class SettingsChange:
    """One change of settings by a person."""

    time: float
    """Unix time."""
    by: str
    """Name of the user."""
    iteration: int
    """First iteration that was not trained then."""
    settings: tuple[Difference, ...]

    @property
    def in_words(self) -> str:
        """A phrase like ``from iteration 5: scheduler.update.time 1:00:00 -> 2:00:00``."""
        return f"from iteration {self.iteration}: {', '.join(map(difference_in_words, self.settings))}"


@dataclass(frozen=True)
class _File:
    """Content of settings.json."""

    changes: tuple[SettingsChange, ...] = field(default=())


def difference_in_words(one: Difference) -> str:
    return f"{one.key} {value_in_words(one.before)} -> {value_in_words(one.after)}"


def read_changes(paths: RunPaths) -> tuple[SettingsChange, ...]:
    """Return the changes of a run's settings, oldest first.

    Raises:
        RunError: a copy of their file is there, but none that can be read.
    """
    found = read_either(paths.settings, _parse)
    if isinstance(found, str):
        raise RunError(
            f"{found}, nor can its copy, so what the run's settings are is not known; restore one from a "
            "backup, or remove both, and give what was changed once more: slurm-ppo resume "
            f"{shlex.quote(str(paths.root))} KEY=VALUE ..."
        )
    return found.changes if found else ()


def _parse(content: dict[str, Any]) -> _File:
    return converted(_File, content)


def write_changes(paths: RunPaths, changes: Sequence[SettingsChange]) -> None:
    """Write all changes, for the holder of the run's lease."""
    write_both(paths.settings, paths.root, {"changes": [asdict(one) for one in changes]})


def mend_changes(paths: RunPaths) -> str | None:
    """Write both files again where one is corrupt or gone, for the holder of the run's lease. Returns what
    was wrong. Raises as :func:`read_changes`."""
    if why := why_spoilt(paths.settings, _parse):
        write_changes(paths, read_changes(paths))
    return why


def with_changes(config: Config, changes: Sequence[SettingsChange]) -> Config:
    """Return the configuration with changes applied in their order. Pure.

    Raises:
        ConfigError: this version has no such key or value.
    """
    return _with(config, [(one.key, one.after) for change in changes for one in change.settings])


def without_changes(config: Config, changes: Sequence[SettingsChange]) -> Config:
    """Return the configuration as it was before changes, the newest last, were applied. Pure."""
    return _with(config, [(one.key, one.before) for change in reversed(changes) for one in change.settings])


def _with(config: Config, settings: Sequence[tuple[str, Any]]) -> Config:
    if not settings:
        return config
    mapping = to_mapping(config)
    for key, value in settings:
        mapping = applied(mapping, key, value)
    return from_mapping(mapping)


def history(changes: Sequence[SettingsChange]) -> list[str]:
    """Return a line for each change, oldest first."""
    return [
        f"{number}  {moment(one.time)}  {one.by}  {one.in_words}" for number, one in enumerate(changes, 1)
    ]


def last_change(changes: Sequence[SettingsChange]) -> str:
    """Say what was changed last, and how often settings were changed; empty where none was."""
    if not changes:
        return ""
    times = "once" if len(changes) == 1 else f"{len(changes)} times"
    return f"settings were changed {times}, last by {changes[-1].by} {changes[-1].in_words}"
