"""Numbers as people write them: the last one of a text, and whether two are the same. Pure, and total:
whatever a text is made of, no error comes of it.

What stands in a fraction, a time, a date or split thousands is one number: 3/2 is not 2, 12:30 is not 30,
and 1 000 is not 0. One that has no value of its own, as a time or a date has none, is the same only as one
that is written with the same numbers.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction

_MINUS = str.maketrans(dict.fromkeys("\u2212\ufe63\uff0d\u2013", "-"))
"""Typographic signs; an en dash between numbers is the hyphen of a range, as is any other."""
_SPACES = " \u00a0\u2009\u202f"
_SPLIT = rf"(?:[{_SPACES}'\u2019_]\d{{3}})+"
_DIGITS = rf"(?:\d{{1,3}}(?:(?:,\d{{3}})+(?![\d,])|{_SPLIT}(?!\d))|\d+)"
_PLAIN = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_SIGN = r"(?:(?<![\w.)])[-+])?"
_BETWEEN = r"(?:\s?/\s?|[:^.]|\*\*)"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})(?:(?P<whole>\d+)[{_SPACES}](?=\d+\s?/\s?\d))?"
    rf"(?P<first>{_PLAIN})(?P<rest>(?:{_BETWEEN}{_PLAIN})+|(?:-\d+){{2,}})?",
    re.ASCII,
)
_PARTS = re.compile(rf"{_PLAIN}|{_BETWEEN}|-", re.ASCII)
_SEPARATOR = re.compile(rf"[,{_SPACES}'\u2019_]")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([-+]?[\d.,]+)\s*\}\s*\{\s*([-+]?[\d.,]+)\s*\}", re.ASCII)
_LATEX_SPACE = re.compile(r"\{,\}|\\[,;:! ]")
_LARGEST = 1000
"""Digits before or behind the point of a number with a value: of one beyond nothing is computed."""


@dataclass(frozen=True)
class Number:
    """A number that stands in a text."""

    value: Fraction | None
    """None: it has no value, or one beyond all bounds."""
    written: tuple[str, ...]
    """Its parts, as they are written."""

    def is_same(self, other: "Number", tolerance: Fraction = Fraction(0)) -> bool:
        if self.value is None or other.value is None:
            return self.written == other.written
        return abs(self.value - other.value) <= tolerance


def numbers_in(text: str) -> Iterator[Number]:
    """Yield the numbers of a text, written in ASCII digits."""
    plain = _LATEX_SPACE.sub(lambda found: "," if found[0] == "{,}" else " ", text.translate(_MINUS))
    plain = _LATEX_FRACTION.sub(r"\1/\2", plain)
    return (_number(found) for found in _NUMBER.finditer(plain))


def last_number(text: str) -> Number | None:
    """Return the last number of a text; None if there is none."""
    found = None
    for found in numbers_in(text):  # noqa: B007
        pass
    return found


def only_number(text: str) -> Number | None:
    """Return the number of a text that has exactly one."""
    found = list(numbers_in(text))
    return found[0] if len(found) == 1 else None


def _number(found: re.Match[str]) -> Number:
    sign, whole, first, rest = found["sign"].strip(), found["whole"], found["first"], found["rest"] or ""
    parts = [first, *(part.strip() for part in _PARTS.findall(rest))]
    value = _value(first) if not rest else _ratio(parts)
    if value is not None and whole is not None:
        value += Fraction(whole) if len(whole) <= _LARGEST else 0
    if value is not None and sign == "-":
        value = -value
    written = tuple(part for part in (sign.replace("+", ""), whole or "", *parts) if part)
    return Number(value, written)


def _ratio(parts: list[str]) -> Fraction | None:
    """Return the value of a fraction; None of all else that is written with several numbers."""
    if len(parts) != 3 or parts[1] != "/":
        return None
    above, below = _value(parts[0]), _value(parts[2])
    return None if above is None or not below else above / below


def _value(written: str) -> Fraction | None:
    try:
        number = Decimal(_SEPARATOR.sub("", written))
    except InvalidOperation:  # an exponent that Decimal has no room for
        return None
    is_small = -_LARGEST <= number.adjusted() <= _LARGEST and len(written) <= _LARGEST
    return Fraction(number) if is_small else None
