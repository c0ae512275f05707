"""Ready rules, each registered under its own name: ``reward.components.NAME.function=exact_match``.

Options are given as ``reward.components.NAME.arguments.OPTION=...``. They look at one response at a time and
import little but the standard library and each other.

Numbers are read as people write them, whatever a text is made of. What stands in a fraction, a time, a date
or split thousands is one number: 3/2 is not 2, 12:30 is not 30, and 1 000 is not 0. One that has no value of
its own, as a time or a date has none, is the same only as one that is written with the same numbers.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from fractions import Fraction
from typing import Any

from pipeline.plugins.marks import Row, rule

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


class Unit(StrEnum):
    """The unit of a length."""

    CHARACTERS = "characters"
    WORDS = "words"


def check_answers(rows: Sequence[Row], *, column: str = "ground_truth", **arguments: Any) -> list[str | None]:
    """Return why a row's answer is none: there is none, or an empty list of them."""
    if rows and column not in rows[0]:
        raise ValueError(no_column(column, rows[0]))
    return [answer_problem(column, row[column]) for row in rows]


def check_numbers(rows: Sequence[Row], *, column: str = "ground_truth", **arguments: Any) -> list[str | None]:
    """Return why a row's answer is none, or which of its answers holds no number."""

    def problem(answer: Any) -> str | None:
        listed = answer if isinstance(answer, list | tuple) else [answer]
        wrong = [one for one in listed if last_number(str(one)) is None]
        return f"{column!r} holds no number: {wrong[0]!r:.80}" if wrong else None

    found = check_answers(rows, column=column)
    return [why or problem(row[column]) for why, row in zip(found, rows, strict=True)]


def answer_problem(column: str, answer: Any) -> str | None:
    """Return why an answer is none; None if it is one."""
    if answer is None:
        return f"{column!r} is missing or null"
    if isinstance(answer, list | tuple) and not answer:
        return f"{column!r} is an empty list"
    return f"{column!r} has a null among its answers" if _has_null(answer) else None


def _has_null(answer: Any) -> bool:
    return isinstance(answer, list | tuple) and any(one is None for one in answer)


@rule(check=check_answers)
def exact_match(
    *,
    responses: Sequence[str],
    column: str = "ground_truth",
    pattern: str | None = None,
    ignore_case: bool = False,
    **columns: Any,
) -> list[float]:
    """Score 1 where the response is the answer, surrounding blanks apart, else 0.

    Args:
        column: column of the prompt file with the answer, or a list of answers that are all right.
        pattern: regular expression whose first group is compared; its last match in the response counts.
    """

    def fold(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    found = extracted(responses, pattern)
    return matches(found, answers(columns, column), lambda text, right: fold(str(right)) == fold(text))


@rule(check=check_numbers)
def numeric_match(
    *,
    responses: Sequence[str],
    column: str = "ground_truth",
    pattern: str | None = None,
    tolerance: float = 0.0,
    **columns: Any,
) -> list[float]:
    """Score 1 where the last number of the response is the answer, else 0. Commas, spaces or apostrophes may
    separate thousands; a fraction, a time or a date is one number (:mod:`stages.rewards.ready`).

    Args:
        column: column of the prompt file with the number, text whose last number it is; or a list of these.
        pattern: regular expression whose first group is looked at; its last match in the response counts. It
            must hold exactly one number.
        tolerance: largest difference that still counts as equal.
    """
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"numeric_match: tolerance={tolerance} must be a number of at least 0")
    allowed, find = Fraction(str(tolerance)), last_number if pattern is None else only_number

    def is_right(text: str, right: Any) -> bool:
        number, wanted = find(text), last_number(str(right))
        if wanted is None:
            raise ValueError(f"column {column!r} holds no number: {right!r}")
        return number is not None and number.is_same(wanted, allowed)

    return matches(extracted(responses, pattern), answers(columns, column), is_right)


@rule()
def regex_match(
    *, responses: Sequence[str], pattern: str, anywhere: bool = False, **columns: Any
) -> list[float]:
    """Score 1 where the response has the format, else 0. ``.`` matches line ends too.

    Args:
        anywhere: whether a part of the response is enough. Default: all of it, surrounding blanks apart.
    """
    compiled = re.compile(pattern, re.DOTALL)
    match: Callable[[str], Any] = compiled.search if anywhere else compiled.fullmatch
    return [float(match(response.strip()) is not None) for response in responses]


@rule()
def length_penalty(
    *, responses: Sequence[str], limit: int, buffer: int, unit: str = Unit.CHARACTERS, **columns: Any
) -> list[float]:
    """Score 0 up to ``limit - buffer``, linearly down to -1 at ``limit``, then -1 (arXiv 2503.14476, eq. 13).

    Args:
        unit: characters or words. For tokens see algorithm.shaping.overlong_buffer.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"length_penalty: buffer={buffer} must be between 1 and limit={limit}")
    counted = Unit(unit)
    lengths = [len(r) if counted is Unit.CHARACTERS else len(r.split()) for r in responses]
    return [-min(max((length - (limit - buffer)) / buffer, 0.0), 1.0) for length in lengths]


@rule()
def repetition_penalty(*, responses: Sequence[str], size: int = 3, **columns: Any) -> list[float]:
    """Score minus the share of word n-grams that repeat an earlier one: 0 if all differ, near -1 for a loop.

    Args:
        size: words of an n-gram.
    """
    if size < 1:
        raise ValueError(f"repetition_penalty: size={size} must be at least 1")
    return [-repeated_share(response.lower().split(), size) for response in responses]


def repeated_share(words: Sequence[str], size: int) -> float:
    grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def answers(columns: Mapping[str, Any], column: str) -> Sequence[Any]:
    """Return a column of the prompt file. Raises ValueError where there is none, or an empty field."""
    if column not in columns:
        raise ValueError(no_column(column, columns))
    found: Sequence[Any] = columns[column]
    if any(answer is None for answer in found):
        raise ValueError(f"column {column!r} of the prompt file is empty")
    return found


def no_column(column: str, columns: Iterable[str]) -> str:
    has = ", ".join(sorted({*columns} - {"prompts", "plain_responses", "response_messages"})) or "none"
    return f"the prompt file has no column {column!r}; it has: {has}; see arguments.column"


def matches(found: Sequence[str], right: Sequence[Any], is_right: Callable[[str, Any], bool]) -> list[float]:
    """Score 1 where the text is right by the row's answer, or by one of its answers if it is a list."""
    listed = [row if isinstance(row, list | tuple) else [row] for row in right]
    return [float(any(is_right(text, one) for one in row)) for text, row in zip(found, listed, strict=True)]


def extracted(responses: Sequence[str], pattern: str | None) -> list[str]:
    """Return the part of each response that is compared; empty where the pattern is not found."""
    if pattern is None:
        return list(responses)
    compiled = re.compile(pattern, re.DOTALL)
    if compiled.groups < 1:
        raise ValueError(f"pattern {pattern!r} has no group, which would say what to compare")
    found = [list(compiled.finditer(response)) for response in responses]
    return [(matches[-1].group(1) or "") if matches else "" for matches in found]
