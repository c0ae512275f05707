"""Run directories, folders and files that a typed path may become. Of those whose names fit it looks at a
bounded number."""

import os
from collections.abc import Callable

_MOST_ENTRIES, _MOST_LOOKS = 4000, 300
"""Limits on the entries of a folder that are offered, and on the folders that are searched for runs."""
_MOST_VERSIONS = 100


def run_paths(typed: str) -> list[str]:
    """Return the runs that a typed path may become, and folders with runs in them, which end in a slash.

    Where there are neither, all folders: runs may be further down.
    """
    if typed.endswith("/") and is_run(typed):
        return [typed]
    folders = _folders(typed)
    runs = [path for path in folders if is_run(path)]
    others = [path for path in folders[:_MOST_LOOKS] if path not in runs]
    with_runs = [f"{path}/" for path in others if _holds_runs(path)]
    return [*runs, *with_runs] if runs or with_runs else [f"{path}/" for path in others]


def versions(root: str) -> list[str]:
    """Return what may follow ``RUN@``: ``best``, and the iterations that were begun, newest first."""
    if not is_run(root):
        return []
    begun = sorted(set(map(int, filter(str.isdecimal, _listed(f"{root}/iterations")))) - {0}, reverse=True)
    best = ["best"] if os.path.exists(f"{_real(root)}/best.json") else []
    return [*best, *map(str, begun[:_MOST_VERSIONS])]


def file_paths(typed: str) -> list[str]:
    """Return folders, which end in a slash, and files."""
    folders = set(_folders(typed))
    return [f"{path}/" if path in folders else path for path in _entries(typed)]


def folder_paths(typed: str) -> list[str]:
    return [f"{path}/" for path in _folders(typed)]


def options_of_groups(config_dir: str) -> dict[str, list[str]]:
    """Return the options of each group in a folder of the user's: names of ``GROUP/OPTION.yaml``."""
    found: dict[str, list[str]] = {}
    for group in _names(config_dir, _is_shown):
        if names := _names(f"{config_dir}/{group}", lambda name: name.endswith(".yaml")):
            found[group] = [name.removesuffix(".yaml") for name in names]
    return found


def is_run(path: str) -> bool:
    return any(os.path.isfile(os.path.join(_real(path), name)) for name in ("run.json", "run.copy.json"))


def _holds_runs(path: str) -> bool:
    """Whether one of the first folders in it is a run."""
    return any(is_run(f"{path}/{name}") for name in _names(path, _is_shown)[:_MOST_LOOKS])


def _folders(typed: str) -> list[str]:
    return [path for path in _entries(typed) if os.path.isdir(_real(path))]


def _entries(typed: str) -> list[str]:
    """Return the paths that begin like the typed one; hidden ones only where a dot was typed."""
    head, tail = os.path.split(typed)
    start = typed[: len(typed) - len(tail)]
    is_hidden_wanted = tail.startswith(".")
    names = _names(head or ".", lambda name: name.startswith(tail) and (is_hidden_wanted or _is_shown(name)))
    return [start + name for name in names]


def _is_shown(name: str) -> bool:
    return not name.startswith(".")


def _names(folder: str, is_wanted: Callable[[str], bool]) -> list[str]:
    """Return the first of the names in a folder that are wanted, sorted."""
    return sorted(filter(is_wanted, _listed(folder)))[:_MOST_ENTRIES]


def _listed(folder: str) -> list[str]:
    """Return all names in a folder; none where it cannot be read."""
    try:
        return os.listdir(_real(folder))
    except OSError:
        return []


def _real(path: str) -> str:
    return os.path.expanduser(path)
