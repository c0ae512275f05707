"""Config groups: where their options lie, and what of an experiment another option takes away.

Keys of a user's file lie below the name of its group, unless the line ``# @package _global_`` puts them at
the top: where that is not what the writer meant, it is said here.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.conversion import from_yaml
from pipeline.config.issue import Mistake
from pipeline.config.keys import fields_of, leaves
from pipeline.config.schema import Config


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


# --- files whose keys Hydra puts elsewhere than their writer meant ---

GLOBAL = "# @package _global_"
_ANY_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class GroupFile:
    """The file of an option that was chosen."""

    group: str
    name: str
    """Path below the folder of groups."""
    package: str | None
    """Where its first line puts its keys; None without such a line."""
    content: Mapping[str, Any]


def chosen_files(config_dir: Path | None, choices: Mapping[str, Any]) -> Iterator[GroupFile]:
    """Yield the files of the user's that options were read from.

    Args:
        choices: options by their groups.
    """
    for group, option in choices.items() if config_dir else ():
        file = config_dir / group / f"{option}.yaml" if config_dir else Path()
        if file.is_file():
            package = _ANY_PACKAGE.search(file.read_text())
            yield GroupFile(group, f"{group}/{option}.yaml", package and package[1], content_of(file))


def misplaced(files: Iterable[GroupFile]) -> Iterator[Mistake]:
    """Yield the keys that lie where no key is, because of their file's first line or for want of it."""
    sections = fields_of(Config)
    for file in files:
        keys = {key: value for key, value in file.content.items() if key != "defaults"}
        if file.package is None and file.group not in sections:
            why = f"its keys are below {file.group!r}, as its first line is not {GLOBAL!r}; add that line"
            yield Mistake(file.name, f"{file.name}: {why}", _leaves(keys))
            continue
        own = fields_of(sections.get(file.group))
        for key, value in keys.items():
            if file.package is None and key in sections and key not in own:
                text = f"{file.name}: {_why_below(key, file.group)}"
                yield Mistake(f"{file.group}.{key}", text, _leaves({key: value}))
            if file.package == "_global_" and key in own and key not in sections:
                why = f"its first line puts {key!r} at the top; write it below {file.group!r}"
                yield Mistake(key, f"{file.name}: {why}", _leaves({file.group: {key: value}}))


def _why_below(key: str, group: str) -> str:
    """Say why a section's key within a file of a group is no section."""
    if key == group:
        return f"its keys are below {group!r} already; leave {key!r} out around them"
    return f"its keys are below {group!r}, so that {key!r} does too; let its first line be {GLOBAL!r}"


def _leaves(keys: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(leaf for key, value in keys.items() for leaf in leaves(value, key))
