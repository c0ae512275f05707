"""Keys of the configuration: the dataclasses walked along a key's dots, and what an unknown one may mean."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pipeline.config.issue import Mistake
from pipeline.config.peers import peer_words
from pipeline.config.schema import Config

LONGEST_VALUE = 80
_LONGEST_LINE = 290
_LIKE, SURE = 0.6, 0.8
"""Least likeness of a name that may be meant, and of one that is meant rather than another's word."""
_MOST_PLACES = 3


def mistake_in_key(key: str, groups: Mapping[str, Sequence[str]]) -> Mistake | None:
    """Return what is wrong with a key of an override; None for one that the dataclasses have.

    Args:
        groups: options of each config group.
    """
    node: Any = Config
    if fields_of(fields_of(Config).get(key)):
        row = peer_words(key)
        one = row.here[0] if row else f"{key}.KEY"
        return Mistake(key, f"{key}: holds several keys; set one of them, e.g. {one}=VALUE")
    done: list[str] = []
    for part in key.split("."):
        if is_mapping(node):
            return None  # reward.components.NAME...: names are the user's, pydantic checks what is below
        legal = fields_of(node)
        if not legal:
            value = ".".join(done)
            return Mistake(key, f"{key}: {value} holds one value and no keys; write {value}=VALUE")
        if part not in legal:
            where = f"in {'.'.join(done)}" if done else "at the top"
            names = [*legal, *([] if done else sorted(set(groups) - set(legal)))]
            return unknown(key, f"{key[:LONGEST_VALUE]}: unknown key {cut(part)} {where}", done, part, names)
        done.append(part)
        node = legal[part]
    return None


def unknown(
    key: str, text: str, above: Sequence[str], part: str, legal: Sequence[str], value: object = None
) -> Mistake:
    """Return the mistake of a key of which a part is unknown.

    Args:
        text: what is wrong, without the way out.
        above: the parts before it.
        legal: names that could stand there.
        value: what the key was given, if that is known.
    """
    near = nearest(part, legal, SURE)
    if (near is None or key == part) and (row := peer_words(key)):
        return Mistake(key, f"{text}; {row.advice}", tuple(row.here))
    if near is None and (places := places_of(key.rpartition(".")[2])):
        return Mistake(key, f"{text}; did you mean {' or '.join(places)}?", places)
    near = near or nearest(part, legal)
    meant = ".".join([*above, near, *key.split(".")[len(above) + 1 :]]) if near else ""
    return Mistake(key, with_legal(text, part, legal), tuple(leaves(value, meant)) if near else ())


def places_of(name: str) -> tuple[str, ...]:
    """Return the keys that end with a name, where they are so few that one of them may be meant."""
    found = tuple(key for key in _known_keys() if key.rpartition(".")[2] == name)
    return found if len(found) <= _MOST_PLACES else ()


@cache
def _known_keys() -> tuple[str, ...]:
    """Return the keys of values, but for those below names that are the user's."""

    def below(node: Any, key: str) -> Iterator[str]:
        fields = {} if is_mapping(node) else fields_of(node)
        for name, kind in fields.items():
            yield from below(kind, f"{key}.{name}" if key else name)
        if not fields:
            yield key

    return tuple(below(Config, ""))


def leaves(value: object, key: str) -> Iterator[str]:
    """Yield the keys of the values in a tree of mappings, which lies at ``key``."""
    if not isinstance(value, Mapping):
        yield key
        return
    for name, inner in value.items():
        yield from leaves(inner, f"{key}.{name}")


def fields_of(node: Any) -> dict[str, Any]:
    """Return field name -> type of a dataclass or a union of them; empty for anything else."""
    if dataclasses.is_dataclass(node):
        return typing.get_type_hints(node)
    fields: dict[str, Any] = {}
    for option in alternatives(node):
        for name, kind in fields_of(option).items():
            fields[name] = fields[name] | kind if name in fields and fields[name] != kind else kind
    return fields


def alternatives(node: Any) -> tuple[Any, ...]:
    """Return the types of a union; none for anything else."""
    is_union = typing.get_origin(node) in (types.UnionType, typing.Union)
    return typing.get_args(node) if is_union else ()


def is_mapping(node: Any) -> bool:
    """Whether a type is a dictionary, or a union with one."""
    return any(typing.get_origin(option) is dict for option in (node, *alternatives(node)))


def siblings(location: Sequence[str], kind: str) -> list[str]:
    """Return the legal names beside the last part of a key; of a union, the ``kind`` that was given."""
    node: Any = Config
    for part in location[:-1]:
        node = typing.get_args(node)[1] if is_mapping(node) else fields_of(node).get(part)
        node = next((option for option in alternatives(node) if getattr(option, "kind", None) == kind), node)
    return sorted(fields_of(node))


def nearest(word: str, names: Sequence[str], likeness: float = _LIKE) -> str | None:
    """Return the name that is most like a word, in upper or lower case; None where none is."""
    by_letters = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), by_letters, n=1, cutoff=likeness)
    return by_letters[close[0]] if close else None


def with_legal(problem: str, word: str, names: Sequence[str]) -> str:
    """Append the legal names to a problem: as many of them as a line has room for."""
    shown, more, close = list(names), "", nearest(word, names)
    hint = f" (did you mean {close!r}?)" if close else ""
    while len(line := f"{problem}; legal: {', '.join(shown)}{more}{hint}") > _LONGEST_LINE and shown:
        shown.pop()
        more = f" and {len(names) - len(shown)} more (slurm-ppo config shows all)"
    return line


def cut(value: Any) -> str:
    """Return a value as it was given, or its beginning where it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
