"""Ready rules are total: whatever a policy writes, they give a finite number, and soon."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stages.rewards import ready
from stages.rewards.numbers import last_number

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
