"""``slurm-ppo complete FORM ...``: what a shell's script calls at each press of Tab.

It must be quick, and never disturb the line that is being typed: whatever goes wrong, nothing is offered. Of
paths that fit what is typed it looks at a bounded number.
"""

import json
import os
import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Table = dict[str, Any]
    """Content of words.json: ``commands``, ``keys``, ``groups``, ``stages`` and ``logs``."""
else:
    Table = dict

WORDS = os.path.join(os.path.dirname(__file__), "words.json")
CONFIG_DIR = "--config-dir"
FILES = "files"
"""Stands in words.json for values that are paths."""
SHELLS = ("bash", "zsh", "fish")
"""Shells that there is a script for."""
_UNSAFE = re.compile(r"([^\w@%+=:,./~-])")
"""Characters of a word to put a backslash before, for bash and zsh."""
_KEPT = "@$"
"""Breaks with which bash begins the word that it replaces; behind any other it begins after the sign."""
_MOST_ENTRIES, _MOST_LOOKS = 4000, 300
"""Limits on the entries of a folder that are offered, and on the folders that are searched for runs."""
_MOST_VERSIONS = 100


def main(arguments: list[str]) -> None:
    """Print what fits, a word a line; nothing where anything goes wrong."""
    try:
        found = answer(arguments[0], arguments[1:], read_table())
    except Exception:  # a message would land in the line that is being typed
        return
    text = "".join(f"{word}\n" for word in found if word.isprintable())
    sys.stdout.buffer.write(os.fsencode(text))
    sys.stdout.flush()


def read_table() -> Table:
    with open(WORDS, encoding="utf-8") as file:
        table: Table = json.load(file)
        return table


def answer(form: str, given: list[str], table: Table) -> list[str]:
    """Return what fits, as the shell takes it.

    Args:
        form: bash, zsh, or plain for words that the shell itself quotes.
        given: from bash the command's name, COMP_WORDBREAKS and the line up to the cursor; from the others
            the words after the command up to the cursor, unquoted.
    """
    if form != "bash":
        found = offers(given[:-1], given[-1], table)
        return found if form == "plain" else [escaped(word) for word in found]
    name, breaks, line = given
    words, quote_at = split_line(line)
    start = words.index(name) + 1 if name in words else 1
    typed = words[-1]
    found = offers(words[start:-1], typed, table)
    rest = [remainder(word, typed, breaks, quote_at) for word in found]
    return rest if quote_at is not None else [escaped(word) for word in rest]


def escaped(word: str) -> str:
    return _UNSAFE.sub(r"\\\1", word)


# --- the line ---


def split_line(line: str) -> tuple[list[str], int | None]:
    """Split the part of a line before the cursor into words, as a shell does, quotes and backslashes undone.

    Returns:
        The words; the last is the one being typed, perhaps empty. And where in it a quote was opened that is
        not closed yet; None without one.
    """
    words, quote, quote_at = [""], "", None
    is_escaped = False
    for letter in line:
        if is_escaped:
            words[-1] += letter
            is_escaped = False
        elif letter == "\\" and quote != "'":
            is_escaped = True
        elif quote and letter == quote:
            quote = ""
        elif quote:
            words[-1] += letter
        elif letter in "'\"":
            quote, quote_at = letter, len(words[-1])
        elif letter.isspace():
            words += [""] if words[-1] or quote_at is not None else []
            quote_at = None
        else:
            words[-1] += letter
    return words, quote_at if quote else None


def remainder(word: str, typed: str, breaks: str, quote_at: int | None) -> str:
    """Return the part of an offered word that bash puts in place of what it takes for the typed one.

    bash begins a new word at each of its COMP_WORDBREAKS, such as = and @, and behind an open quote.
    """
    if quote_at is not None:
        return word[quote_at:]
    last = max((typed.rfind(sign) for sign in breaks if not sign.isspace()), default=-1)
    return word[last:] if last >= 0 and typed[last] in _KEPT else word[last + 1 :]


# --- words ---


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
        return [f"{path}/" for path in _folders(typed)]
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
    key: str, typed: str, known: "dict[str, list[str] | str]", groups: dict[str, list[str]]
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


# --- paths ---


def run_paths(typed: str) -> list[str]:
    """Return the runs that a typed path may become, and folders with runs in them, which end in a slash.

    Where there are neither, all folders: runs may be further down.
    """
    if typed.endswith("/") and is_run(typed):
        return [typed]
    folders = _folders(typed)
    runs = [path for path in folders if is_run(path)]
    others = [path for path in folders[:_MOST_LOOKS] if path not in runs]
    with_runs = [
        f"{path}/"
        for path in others
        if any(is_run(f"{path}/{name}") for name in _names(path, _is_shown)[:_MOST_LOOKS])
    ]
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


def options_of_groups(config_dir: str) -> dict[str, list[str]]:
    """Return the options of each group in a folder of the user's: names of ``GROUP/OPTION.yaml``."""
    found: dict[str, list[str]] = {}
    for group in _names(config_dir, _is_shown):
        if names := _names(f"{config_dir}/{group}", lambda name: name.endswith(".yaml")):
            found[group] = [name.removesuffix(".yaml") for name in names]
    return found


def is_run(path: str) -> bool:
    return any(os.path.isfile(os.path.join(_real(path), name)) for name in ("run.json", "run.copy.json"))


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


def _names(folder: str, is_wanted: "Callable[[str], bool]") -> list[str]:
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
