"""What may stand where a person is typing: commands, options, runs, settings and their values."""

from pipeline.cli.completion.runs import (
    file_paths,
    folder_paths,
    options_of_groups,
    run_paths,
    versions,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    Table = dict[str, Any]
    """Content of words.json: ``commands``, ``keys``, ``groups``, ``stages`` and ``logs``."""
else:
    Table = dict

CONFIG_DIR = "--config-dir"
FILES = "files"
"""Stands in words.json for values that are paths."""
SHELLS = ("bash", "zsh", "fish")
"""Shells that there is a script for."""


def offers(before: list[str], typed: str, table: Table) -> list[str]:
    """Return the words that the typed one may become.

    Args:
        before: the words between the program's name and the typed one.
    """
    node, place, waiting, config_dir = table, 0, None, ""
    for word in before:
        if waiting is not None:
            config_dir = word if waiting == CONFIG_DIR else config_dir
            waiting = None
        elif word.startswith("-"):
            name, _, value = word.partition("=")
            takes_value = node.get("options", {}).get(name) is not None
            config_dir = value if name == CONFIG_DIR and value else config_dir
            waiting = name if takes_value and not value else None
        elif "commands" in node:
            node = node["commands"].get(word, {})
        else:
            place += 1
    if waiting is not None:
        return of_kind(node["options"][waiting], typed, table, config_dir)
    if typed.startswith("-"):
        return _options(node, typed, table, config_dir)
    if "commands" in node:
        return _beginning(typed, node["commands"])
    return of_kind(_kind_at(node, place), typed, table, config_dir)


def _options(node: Table, typed: str, table: Table, config_dir: str) -> list[str]:
    """Return the options of a command, or behind ``--option=`` its values."""
    options = node.get("options", {})
    name, sign, value = typed.partition("=")
    if sign:
        return [f"{name}={found}" for found in of_kind(options.get(name) or "", value, table, config_dir)]
    return _beginning(typed, [*options, "--help"])


def _kind_at(node: Table, place: int) -> str:
    """Return the kind of a command's argument, "" for none; the last may stand for several."""
    kinds: list[str] = node.get("arguments", [])
    if place >= len(kinds) and kinds and kinds[-1].endswith("..."):
        place = len(kinds) - 1
    kind = kinds[place] if place < len(kinds) else ""
    is_first = place == 0
    return kind.removesuffix("...") if is_first or kind != "run|overrides..." else "overrides"


def of_kind(kind: str, typed: str, table: Table, config_dir: str) -> list[str]:
    """Return the words of a kind of argument that begin like the typed one."""
    if kind == "source" and "@" in typed:
        root, _, start = typed.rpartition("@")
        return [f"{root}@{version}" for version in _beginning(start, versions(root))]
    if kind in ("run", "source"):
        return run_paths(typed)
    if kind == "run|overrides":
        is_path = "/" in typed or typed.startswith((".", "~"))
        words = [] if is_path else overrides(typed, table, config_dir)
        return [*run_paths(typed), *words] if "=" not in typed else words
    if kind == "overrides":
        return overrides(typed, table, config_dir)
    if kind in ("stages", "logs"):
        return _beginning(typed, table[kind])
    if kind == "shell":
        return _beginning(typed, SHELLS)
    if kind == "folder":
        return folder_paths(typed)
    return file_paths(typed) if kind == FILES else []


def overrides(typed: str, table: Table, config_dir: str) -> list[str]:
    """Return settings: keys, one part of their name at a time, and behind ``=`` values and options."""
    signs = typed[: len(typed) - len(typed.lstrip("+"))]
    key, sign, value = typed[len(signs) :].partition("=")
    groups = _groups(table, config_dir)
    if sign:
        return [f"{signs}{key}={found}" for found in _values(key, value, table["keys"], groups)]
    return [signs + word for word in keys(key, [*groups, *table["keys"]])]


def _groups(table: Table, config_dir: str) -> dict[str, list[str]]:
    """Return the options by group, those of the user's folder included."""
    found: dict[str, list[str]] = dict(table["groups"])
    for group, options in options_of_groups(config_dir).items() if config_dir else ():
        found[group] = sorted({*found.get(group, []), *options})
    return found


def keys(typed: str, known: list[str]) -> list[str]:
    """Return what a typed key may become: ``section.`` or ``key=``. A ``*`` in a known key is any name."""
    before, typed_part = typed.split(".")[:-1], typed.split(".")[-1]
    found: dict[str, None] = {}
    for key in known:
        parts = key.split(".")
        if len(parts) > len(before) and all(map(_fits, before, parts)):
            part = parts[len(before)]
            if part != "*" and part.startswith(typed_part):
                end = "." if len(parts) > len(before) + 1 else "="
                found[".".join([*before, part]) + end] = None
    return sorted(found)


def _fits(given: str, part: str) -> bool:
    return part in ("*", given)


def _values(
    key: str, typed: str, known: dict[str, "list[str] | str"], groups: dict[str, list[str]]
) -> list[str]:
    if key in groups:
        return _beginning(typed, groups[key])
    parts = key.split(".")
    for name, values in known.items():
        pattern = name.split(".")
        if len(pattern) == len(parts) and all(map(_fits, parts, pattern)):
            return file_paths(typed) if isinstance(values, str) else _beginning(typed, values)
    return []


def _beginning(typed: str, words: "Iterable[str]") -> list[str]:
    return [word for word in words if word.startswith(typed)]
