"""Ready rules are total: whatever a policy writes, they give a finite number, and soon."""

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stages.rewards import ready
from stages.rewards.ready import last_number

TEXTS = st.text(max_size=300) | st.text(
    alphabet="0123456789.,:/-+eE '\u2019\u202f\u2212^_%$\\{}frac \n", max_size=300
)
"""Any unicode, lone surrogates too; and what numbers are written with."""
RULES = {
    "exact_match": {"ground_truth": "4"},
    "exact_match by place": {"ground_truth": "4", "pattern": "<a>(.*?)</a>", "ignore_case": True},
    "numeric_match": {"ground_truth": "#### 1,234.5"},
    "numeric_match by place": {"ground_truth": 3, "pattern": r"\{(.*)\}", "tolerance": 0.5},
    "regex_match": {"pattern": "<think>.*</think>.*"},
    "length_penalty": {"limit": 10, "buffer": 4, "unit": "words"},
    "repetition_penalty": {"size": 2},
}


@pytest.mark.parametrize("rule", RULES)
@given(text=TEXTS)
@example(text="9e9999999")
@example(text="1e-9999999999999999999999")
@example(text="\ud800 7")
@example(text="\x00\u0663")
def test_any_response_has_a_score(rule, text):
    given_ = dict(RULES[rule])
    if "ground_truth" in given_:
        given_["ground_truth"] = [given_["ground_truth"]]
    [score] = getattr(ready, rule.split()[0])(responses=[text], **given_)
    assert math.isfinite(score)


@given(TEXTS, TEXTS)
def test_numbers_are_compared_both_ways_alike(one, other):
    mine, theirs = last_number(one), last_number(other)
    if mine and theirs:
        assert mine.is_same(theirs) == theirs.is_same(mine)
    assert mine is None or mine.is_same(mine)


@given(st.integers(-(10**30), 10**30), st.sampled_from([",", " ", "\u202f", "'", ""]))
def test_thousands_may_be_split(number, by):
    written = f"{number:,}".replace(",", by)
    assert last_number(f"so it is {written}.").value == number


PIECES = ["1 ", "1-", "1,000", "1:", "9", "-", "1.", r"\frac{1}{", "1/ ", "'000", " 000"]


@pytest.mark.parametrize("piece", PIECES)
def test_a_long_response_has_a_score(piece):
    """No chain of digits is looked through again and again."""
    assert ready.numeric_match(responses=[piece * 40_000], ground_truth=[7]) in ([0.0], [1.0])


# what they score


def test_exact_match():
    given = {"responses": [" Paris", "paris", "It is <a>Paris</a>", "x"], "ground_truth": ["Paris"] * 4}
    assert ready.exact_match(**given) == [1.0, 0.0, 0.0, 0.0]
    assert ready.exact_match(**given, ignore_case=True) == [1.0, 1.0, 0.0, 0.0]
    assert ready.exact_match(**given, pattern="<a>(.*?)</a>") == [0.0, 0.0, 1.0, 0.0]
    assert ready.exact_match(responses=["b"], right=[["a", "b"]], column="right") == [1.0]


@pytest.mark.parametrize(
    ("response", "right", "score"),
    [
        ("so it is 42.", 42, 1.0),
        ("1,234.50 dollars", "#### 1234.5", 1.0),
        ("12345678901234567890", "12345678901234567891", 0.0),
        ("first 42, then 43", 42, 0.0),
        ("-3", 3, 0.0),
        ("from 5-3", 3, 1.0),
        ("2e3", 2000, 1.0),
        ("1e99999999999999999999", 1, 0.0),
        ("none", 1, 0.0),
        ("", 1, 0.0),
        ("one of 7", [6, 7], 1.0),
        # what is longer than any number that can be compared
        ("9e9999999", 5, 0.0),
        ("-" + "9" * 5000, 5, 0.0),
        # a number of several is one number
        ("3/2", "1/2", 0.0),
        ("2/4", "1/2", 1.0),
        ("1 1/2", "1/2", 0.0),
        ("it is 1 1/2", 1.5, 1.0),
        ("3/2", 2, 0.0),
        ("1/0", 0, 0.0),
        ("at 12:30", "11:30", 0.0),
        ("at 12:30", "12:30", 1.0),
        ("at 12:30", 30, 0.0),
        ("on 2024-01-05", 5, 0.0),
        ("version 1.2.3", 0.3, 0.0),
        ("2^10", 10, 0.0),
        ("1 000", "5 000", 0.0),
        ("1\u202f000", 1000, 1.0),
        ("1\u2019000.5", 1000.5, 1.0),
        ("in 2020 300 came", 300, 1.0),
        ("x=1,2,3", 3, 1.0),
        # signs, LaTeX
        ("\u22125", -5, 1.0),
        ("\u22125", 0, 0.0),
        ("3 - 5", 5, 1.0),
        ("3\u20135", 5, 1.0),
        (r"\frac{3}{2}", 1.5, 1.0),
        (r"\frac{3}{2}", 2, 0.0),
        (r"1{,}000 and 2\,000", 2000, 1.0),
    ],
)
def test_numeric_match(response, right, score):
    assert ready.numeric_match(responses=[response], ground_truth=[right]) == [score]


def test_numeric_match_with_a_tolerance_and_a_place():
    assert ready.numeric_match(responses=["0.33"], ground_truth=["0.3333"], tolerance=0.01) == [1.0]
    boxed = r"\\boxed\{(.*?)\}"
    assert ready.numeric_match(responses=[r"\boxed{4} or 5"], ground_truth=[4], pattern=boxed) == [1.0]
    for several in (r"\boxed{3 or 4}", r"\boxed{}", "4"):
        assert ready.numeric_match(responses=[several], ground_truth=[4], pattern=boxed) == [0.0]
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be a number of at least 0"):
            ready.numeric_match(responses=["4"], ground_truth=[4], tolerance=wrong)
    with pytest.raises(ValueError, match="column 'ground_truth' holds no number: 'four'"):
        ready.numeric_match(responses=["4"], ground_truth=["four"])


def test_regex_match():
    responses = [" <think>a\nb</think> c", "no <think>a</think>"]
    assert ready.regex_match(responses=responses, pattern="<think>.*</think>.*") == [1.0, 0.0]
    assert ready.regex_match(responses=responses, pattern="<think>", anywhere=True) == [1.0, 1.0]


def test_length_penalty():
    responses = ["a" * n for n in (0, 6, 8, 10, 20)]
    assert ready.length_penalty(responses=responses, limit=10, buffer=4) == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert ready.length_penalty(responses=["a b c"], limit=4, buffer=2, unit="words") == [-0.5]
    with pytest.raises(ValueError, match="'tokens' is not a valid Unit"):
        ready.length_penalty(responses=["a"], limit=4, buffer=2, unit="tokens")


def test_repetition_penalty():
    responses = ["one two three four", "la la la la la", "too short", ""]
    assert ready.repetition_penalty(responses=responses) == pytest.approx([0.0, -2 / 3, 0.0, 0.0])


@given(st.lists(st.text(), max_size=5), st.integers(1, 4))
def test_penalties_are_between_minus_1_and_0_for_any_text(responses, size):
    found = ready.repetition_penalty(responses=responses, size=size)
    found += ready.length_penalty(responses=responses, limit=size + 3, buffer=size)
    assert all(-1 <= score <= 0 for score in found)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12))
def test_a_number_is_found_as_it_is_written(number):
    for text in (f"{number}", f"{number:,}", f"is {number}.", f"({number})"):
        assert ready.last_number(text).value == Fraction(number)
