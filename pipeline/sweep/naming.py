"""Names of a sweep's points and settings, for people, folders, Slurm and W&B. Pure."""

import hashlib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

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


def tags_of(settings: Mapping[str, str], longest: int, keys: Iterable[str] = ()) -> list[str]:
    """Return a tag for each setting, such as ``seed=0``; ``keys`` as for :func:`in_words`."""
    short = short_keys([*settings, *keys])
    return [f"{short[key]}={value}"[:longest] for key, value in settings.items()]


def point_name(
    settings: Mapping[str, str],
    taken: Collection[str],
    longest: int,
    is_free: Callable[[str], bool] = lambda name: True,
) -> str:
    """Return a name for a point like ``learning_rate_1e-6-seed_0``: letters, digits and ``_.-`` only.

    Names that are taken, or too long, end in a mark that follows from all settings.

    Args:
        is_free: whether a name that is not taken may be given.
    """
    return next(name for name in _names(settings, longest) if name not in taken and is_free(name))


def _names(settings: Mapping[str, str], longest: int) -> Iterator[str]:
    """Yield names without end, always the same for the same settings."""
    short = short_keys(settings)
    ends = {key: value.rstrip("/").rpartition("/")[2] or value for key, value in settings.items()}  # of paths
    name = "-".join(f"{slug(short[key])}_{slug(end)}" for key, end in ends.items())
    if len(name) <= longest:
        yield name
    content = repr(sorted(settings.items()))
    for number in itertools.count():
        yield _marked(name, longest, f"{content}{number or ''}")


def _marked(text: str, longest: int, content: str) -> str:
    """Return the begin of a text with a mark that follows from ``content``."""
    mark = hashlib.blake2b(content.encode()).hexdigest()[:_MARK]
    return f"{text[: longest - _MARK - 1].rstrip('-_.')}-{mark}"


def limited(text: str, longest: int) -> str:
    """Return a text of so many characters at most; of longer ones different texts stay different."""
    return text if len(text) <= longest else _marked(text, longest, text)


def slug(text: str) -> str:
    """Return text as names may have it."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text).strip("_.") or "x"
