"""The other columns of JSON Lines: values of any JSON type, which Arrow keeps only where they agree."""

import bisect
import reprlib
from collections import Counter
from collections.abc import Sequence

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


def misfits(values: Sequence[object]) -> dict[int, str]:
    """Find, by index, the values that keep the others from being one column, and why.

    In each place, the kind of value that most rows have there is right (the first one where two are as
    frequent). Numbers that Arrow cannot hold are never right.
    """
    if not isinstance(_array_or_error(values), Exception):
        return {}
    kinds = [kinds_of(value) for value in values]
    counts = Counter(one for found in kinds for one in found if one[1] != _TOO_LARGE)
    usual: dict[Place, str] = {}
    for (place, kind), _ in counts.most_common():
        usual.setdefault(place, kind)
    found = {}
    for index, own in enumerate(kinds):
        wrong = next((one for one in own if one[1] != usual.get(one[0])), None)
        if wrong:
            found[index] = _described(*wrong, usual.get(wrong[0]))
    return found


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
