"""Place of a run on W&B, and its names there: settled when the run is made, so that no later shell moves it.

As W&B itself does it: the configuration goes first, then the environment, then W&B's own settings files.
"""

import configparser
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pipeline.config.schema import WandbConfig

DEFAULT_PROJECT = "slurm-ppo"
DEFAULT_URL = "https://api.wandb.ai"
_SECTION = "default"
"""The only section of W&B's settings files that counts."""
_FOLDERS = (".wandb", "wandb")
"""Folders that W&B keeps its files in, where it is called; the first counts if it is there."""

VARIABLES = {
    "base_url": "WANDB_BASE_URL",
    "project": "WANDB_PROJECT",
    "entity": "WANDB_ENTITY",
    "name": "WANDB_NAME",
    "group": "WANDB_RUN_GROUP",
    "job_type": "WANDB_JOB_TYPE",
    "notes": "WANDB_NOTES",
    "tags": "WANDB_TAGS",
}
"""Field of :class:`WandbPlace` -> variable that gives it where the configuration does not."""
SETTINGS = {
    "base_url": "base_url",
    "project": "project",
    "entity": "entity",
    "name": "run_name",
    "group": "run_group",
    "job_type": "run_job_type",
    "notes": "run_notes",
    "tags": "run_tags",
}
"""Field of :class:`WandbPlace` -> W&B's own name of it, in its settings files too."""


@dataclass(frozen=True, kw_only=True)
class WandbPlace:
    """Destination of a run's rows on W&B, and what the run is called there. Holds no secret."""

    base_url: str = DEFAULT_URL
    """Address of the server, without a password."""
    project: str = DEFAULT_PROJECT
    entity: str | None = None
    """User or team. None: the key's own."""
    name: str
    group: str | None = None
    job_type: str | None = None
    notes: str | None = None
    tags: tuple[str, ...] = ()


def settled(
    config: WandbConfig,
    name: str,
    environment: Mapping[str, str],
    folder: Path,
    origin: WandbPlace | None = None,
) -> WandbPlace:
    """Settle the place of a run that is being made.

    Args:
        name: of the run, for one that nothing else names.
        folder: the folder that the command was typed in, whose W&B settings count.
        origin: place of the run that a fork goes on from: it stays in its project, unless another is given.
    """
    files = _settings_files(environment, folder)
    found: dict[str, Any] = {"name": name}
    for field in (each.name for each in fields(WandbPlace)):
        ways = (environment.get(VARIABLES[field]), _inherited(origin, field), files.get(SETTINGS[field]))
        said = next(filter(None, ways), "")
        if value := getattr(config, field, None) or read_value(field, said):
            found[field] = value
    return WandbPlace(**found)


def _inherited(origin: WandbPlace | None, field: str) -> str | None:
    return getattr(origin, field) if origin and field in ("base_url", "project", "entity") else None


def read_value(field: str, text: str) -> str | tuple[str, ...]:
    """Read a variable's value: a list of tags, an address without a password, or words as they are."""
    if field == "tags":
        return tuple(tag.strip() for tag in text.split(",") if tag.strip())
    if field == "base_url":
        scheme, separator, rest = text.rpartition("://")
        return f"{scheme}{separator}{rest.rpartition('@')[2]}".rstrip("/")
    return text


def _settings_files(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Read W&B's settings: of the user, then of the folder, which go first. Damaged files say nothing."""
    home = environment.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    root = Path(folder, environment.get("WANDB_DIR", ""))
    kept = next((root / name for name in _FOLDERS if (root / name).is_dir()), root)
    found: dict[str, str] = {}
    for path in (Path(home).expanduser(), kept):
        reader = configparser.ConfigParser(interpolation=None)
        try:
            reader.read_string((path / "settings").read_text())
            found |= dict(reader.items(_SECTION))
        except (OSError, ValueError, RuntimeError, configparser.Error):
            continue
    return found
