"""Names of a sweep's points and settings, for people, folders, Slurm and W&B. Pure."""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

LONGEST = 100
"""Most characters of a run's name."""
_MARK = 6
"""Characters of what tells two names apart that would be the same."""


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return for each key its last parts, as many as no other key shares: ``update.epochs`` -> ``epochs``."""
    keys = list(dict.fromkeys(keys))
    return {key: _shortest(key, keys) for key in keys}


def _shortest(key: str, keys: Sequence[str]) -> str:
    parts = key.split(".")
    for count in range(1, len(parts)):
        end = parts[-count:]
        if not any(other != key and other.split(".")[-count:] == end for other in keys):
            return ".".join(end)
    return key


def in_words(settings: Mapping[str, str], keys: Iterable[str] = ()) -> str:
    """Write settings like ``learning_rate=1e-6, seed=0``.

    Args:
        keys: further keys that short names have to differ from.
    """
    short = short_keys([*settings, *keys])
    return ", ".join(f"{short[key]}={value}" for key, value in settings.items())


def tags_of(settings: Mapping[str, str], longest: int) -> list[str]:
    """Return a tag for each setting, such as ``seed=0``."""
    short = short_keys(settings)
    return [f"{short[key]}={value}"[:longest] for key, value in settings.items()]


def point_name(settings: Mapping[str, str], taken: Collection[str], longest: int) -> str:
    """Return a name for a point like ``learning_rate_1e-6-seed_0``: letters, digits and ``_.-`` only.

    Names that are taken, or too long, end in a mark that follows from all settings.
    """
    short = short_keys(settings)
    name = "-".join(f"{slug(short[key])}_{slug(_end_of(value))}" for key, value in settings.items())
    if len(name) <= longest and name not in taken:
        return name
    mark = hashlib.blake2b(repr(sorted(settings.items())).encode()).hexdigest()[:_MARK]
    return f"{name[: longest - _MARK - 1].rstrip('-_.')}-{mark}"


def slug(text: str) -> str:
    """Return text as names may have it."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text).strip("_.") or "x"


def _end_of(value: str) -> str:
    """Return the last part of a path; another value stays as it is."""
    return value.rstrip("/").rpartition("/")[2] if "/" in value else value
