"""The other columns of JSON Lines: values of any JSON type, which Arrow keeps only where they agree.

Text among numbers, and numbers among text, are frequent: answers that are 42 in one row and "42" in the next.
Where at least one in a hundred is text, all are read as text; of fewer, those that are text do not fit.
"""

import bisect
import json
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from pipeline.data.tables import first_line

_TOO_LARGE = "an integer of more than 64 bits"
_KINDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
}
_TEXT = "text"
_BESIDE_TEXT = ("a number", "true or false", _TOO_LARGE)
"""Kinds that are read as text where enough of the others are text."""
_LEAST_TEXT = 0.01
"""Share of text among the numbers of a place from which on all are read as text."""
_MOST_SHOWN = 60

Place = tuple[str | None, ...]
"""Path into a JSON value: keys of objects, None for the entries of a list."""


class Mixed(ValueError):
    """The values do not fit one column."""

    def __init__(self, culprit: int, error: Exception) -> None:
        super().__init__(first_line(error))
        self.culprit = culprit
        """Index of the first value that does not fit those before it."""


def array(values: Sequence[object]) -> pa.Array:
    """Convert JSON values to one column. Raises Mixed where their types differ."""
    found = _array_or_error(values)
    if not isinstance(found, Exception):
        return found

    def is_refused(size: int) -> bool:
        return isinstance(_array_or_error(values[:size]), Exception)

    raise Mixed(bisect.bisect_left(range(len(values)), True, key=is_refused) - 1, found)


@dataclass(frozen=True)
class Fitted:
    """The values of a column, as alike as they can be made."""

    values: Sequence[object]
    misfits: Mapping[int, str] = field(default_factory=dict)
    """By index the values that keep the others from being one column, and why."""
    num_as_text: int = 0
    """Values that are, or hold, a number that was made text."""


def fit(values: Sequence[object]) -> Fitted:
    """Make values alike, and find those that cannot be.

    In each place, the kind of value that most rows have there is right (the first one where two are as
    frequent); text where it is mixed with numbers. Numbers that Arrow cannot hold are never right.
    """
    if not isinstance(_array_or_error(values), Exception):
        return Fitted(values)
    kinds = [kinds_of(value) for value in values]
    counts = Counter(one for found in kinds for one in found)
    texts = _text_places(counts)
    if texts:
        values, before = list(values), values
        for place in texts:
            values = [as_text(value, place) for value in values]
        kinds = [kinds_of(value) for value in values]
        counts = Counter(one for found in kinds for one in found)
        num_as_text = sum(new is not old for new, old in zip(values, before, strict=True))
    usual: dict[Place, str] = {}
    for (place, kind), _ in counts.most_common():
        if kind != _TOO_LARGE:
            usual.setdefault(place, kind)
    found = {}
    for index, own in enumerate(kinds):
        wrong = next((one for one in own if one[1] != usual.get(one[0])), None)
        if wrong:
            found[index] = _described(*wrong, usual.get(wrong[0]))
    return Fitted(values, found, num_as_text if texts else 0)


def _text_places(counts: Mapping[tuple[Place, str], int]) -> list[Place]:
    """Return the places where numbers and text are mixed, with enough text among them."""
    found = []
    for place in dict.fromkeys(place for place, kind in counts if kind == _TEXT):
        num_texts = counts[place, _TEXT]
        num_others = sum(counts.get((place, kind), 0) for kind in _BESIDE_TEXT)
        if num_others and num_texts >= _LEAST_TEXT * (num_texts + num_others):
            found.append(place)
    return found


def as_text(value: object, place: Place = ()) -> object:
    """Return a JSON value with text in one place, instead of a number; the same object if none is there."""
    if not place:
        return value if value is None or isinstance(value, str | dict | list) else json.dumps(value)
    key, *rest = place
    if key is None and isinstance(value, list):
        made = [as_text(one, tuple(rest)) for one in value]
        return value if all(new is old for new, old in zip(made, value, strict=True)) else made
    if isinstance(key, str) and isinstance(value, dict) and key in value:
        new = as_text(value[key], tuple(rest))
        return value if new is value[key] else {**value, key: new}
    return value


def kinds_of(value: object) -> dict[tuple[Place, str], None]:
    """Return each place in a JSON value with the kind of value there, in order; null is of every kind."""
    found: dict[tuple[Place, str], None] = {}
    ahead: list[tuple[Place, object]] = [((), value)]
    while ahead:  # not by recursion: JSON may be nested deeper than Python's stack
        place, inner = ahead.pop()
        if inner is None:
            continue
        is_too_large = isinstance(inner, int) and not -(2**63) <= inner < 2**63
        found[place, _TOO_LARGE if is_too_large else _KINDS[type(inner)]] = None
        if isinstance(inner, dict):
            ahead += [((*place, key), item) for key, item in reversed(inner.items())]
        elif isinstance(inner, list):
            ahead += [((*place, None), item) for item in reversed(inner)]
    return found


def _described(place: Place, kind: str, usual: str | None) -> str:
    where = "".join("[]" if key is None else f".{key}" for key in place)
    inside = f" in {reprlib.repr(where)[1:-1][:_MOST_SHOWN]}" if place else ""
    return f"{kind}{inside}" + (f", where most rows have {usual}" if usual else "")


def _array_or_error(values: Sequence[object]) -> pa.Array | Exception:
    kinds = {type(value) for value in values}
    if bool in kinds and kinds & {int, float}:  # pyarrow would make numbers of some
        return TypeError("true or false among numbers")
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError) as error:
        return error
