"""Files of a user's groups whose keys Hydra puts elsewhere than their writer meant: by their first line.

Keys of a file lie below the name of its group, unless the line ``# @package _global_`` puts them at the top.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.choices import content_of
from pipeline.config.issue import Mistake
from pipeline.config.keys import fields_of, leaves
from pipeline.config.schema import Config

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
            why = f"its keys lie below {file.group!r}, as its first line is not {GLOBAL!r}; add that line"
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
        return f"its keys lie below {group!r} already; leave {key!r} out around them"
    return f"its keys lie below {group!r}, so that {key!r} does too; let its first line be {GLOBAL!r}"


def _leaves(keys: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(leaf for key, value in keys.items() for leaf in leaves(value, key))
