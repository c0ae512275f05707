"""Config groups: where their options lie, and what of an experiment another option takes away."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.conversion import from_yaml


def without_superseded(
    data: dict[str, Any], overrides: Sequence[str], config_dir: Path | None
) -> dict[str, Any]:
    """Return a composed configuration without the reward components that an experiment gives for another
    ``reward`` option than the chosen one: ``experiment=E reward=R`` is E with R's components, not its own.
    """
    chosen = dict(text.lstrip("+").split("=", 1) for text in overrides if "=" in text)
    experiment = _read(config_dir, "experiment", chosen.get("experiment"))
    its_own = _option_of(experiment, "reward")
    if "reward" not in chosen or its_own is None or its_own == chosen["reward"]:
        return data
    kept = set(_components(_read(config_dir, "reward", chosen["reward"]), "components"))
    kept |= {key.split(".")[2] for key in chosen if key.startswith("reward.components.")}
    gone = set(_components(experiment, "reward", "components")) - kept
    components = {name: each for name, each in data["reward"]["components"].items() if name not in gone}
    return data | {"reward": data["reward"] | {"components": components}}


def _read(config_dir: Path | None, group: str, option: str | None) -> Mapping[str, Any]:
    """Return the content of an option's file, as Hydra finds it; empty without one."""
    for root in (config_dir, packaged_configs()):
        if root is not None and option and (file := root / group / f"{option}.yaml").is_file():
            return content_of(file)
    return {}


def content_of(file: Path) -> Mapping[str, Any]:
    """Return what a file of a group holds; empty for something that is no mapping."""
    content = from_yaml(file.read_text())
    return content if isinstance(content, dict) else {}


def _option_of(experiment: Mapping[str, Any], group: str) -> str | None:
    """Return the option of a group that an experiment chooses; None where it chooses none."""
    for entry in experiment.get("defaults") or ():
        for key, option in entry.items() if isinstance(entry, dict) else ():
            if str(key).removeprefix("override ").lstrip("/") == group:
                return str(option)
    return None


def _components(content: Any, *keys: str) -> Mapping[str, Any]:
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content if isinstance(content, dict) else {}


def packaged_configs() -> Path:
    """Return the folder of Hydra groups: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def known_groups(config_dir: Path | None) -> dict[str, list[str]]:
    """List config groups and their options, the packaged ones and the user's."""
    groups: dict[str, list[str]] = {}
    for root in [packaged_configs(), *([config_dir] if config_dir else [])]:
        for file in sorted(root.glob("*/*.yaml")):
            groups.setdefault(file.parent.name, []).append(file.stem)
    return {name: sorted(set(options)) for name, options in groups.items()}
