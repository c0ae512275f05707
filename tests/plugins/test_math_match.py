r"""Answers of mathematics: written in many ways, and right by their value; no text is an error."""

import os
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.config.reward import RuleConfig
from stages.rewards.rules import rule_scores
from tests.support.rollouts import table

if "CI" not in os.environ:
    pytest.importorskip("math_verify", reason="needs the extra math")

from stages.rewards.mathematics import math_match

TEXTS = st.text(max_size=60) | st.text(alphabet="0123456789+-*/^=(){}[]\\frac sqrtxy$!,.%", max_size=60)


@pytest.mark.parametrize(
    ("response", "right", "score"),
    [
        (r"so it is \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        ("so it is 0.5", r"\frac{1}{2}", 1.0),
        ("the answer is $x^2+2x+1$", r"(x+1)^2", 1.0),
        ("$x^{2}+y^{3}$", r"y^3+x^2", 1.0),
        (r"$\{1,2,3\}$", r"\{3,2,1\}", 1.0),
        (r"first \boxed{3}, then \boxed{4}", "3", 0.0),
        ("42", 42, 1.0),
        ("it is 1e3", "1000", 1.0),
        ("it is 2.5e3", "2500", 1.0),
        ("it is 1000", "1e3", 1.0),
        ("it is 1e3", "1", 0.0),
        ("9e9999999", "9", 0.0),
        ("43", 42, 0.0),
        ("no number", "7", 0.0),
        ("7", ["6", "7"], 1.0),
        (r"\boxed{10!}", "3628800", 1.0),
    ],
)
def test_an_answer_is_right_by_its_value(response, right, score):
    assert math_match(responses=[response], ground_truth=[right]) == [score]


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{9^{9^{9}}}",
        "9**9**9**9",
        "(9^9)^(9^9)",
        r"\boxed{99999^{99999}}",
        "99999!!!",
        r"\frac{" * 500,
        "{" * 3000,
    ],
)
def test_what_cannot_be_computed_is_not_the_answer_and_soon(response):
    began = time.monotonic()
    assert math_match(responses=[response], ground_truth=["3"]) == [0.0]
    assert time.monotonic() - began < 5


@settings(max_examples=40, derandomize=True, deadline=None)
@given(text=TEXTS)
@example(text="\ud800 7")
@example(text="\x00")
def test_any_response_has_a_score(text):
    assert math_match(responses=[text], ground_truth=[r"\frac{7}{2}"]) in ([0.0], [1.0])


def test_a_response_whose_comparison_does_not_end_scores_0_and_is_counted(tmp_path, monkeypatch):
    """The rule says itself what such a response is worth: no setting is needed, and no run ends of it."""
    (tmp_path / "endless.py").write_text(
        "from pipeline.plugins.marks import rule\n\n@rule(timeout_score=0.0)\n"
        "def f(*, responses, **columns):\n"
        "    while responses[0] == 'hard':\n        pass\n    return [1.0]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = RuleConfig(function="endless:f", time_limit=0.2)
    assert rule_scores("mine", config, table(["easy", "hard"])) == ([1.0, 0.0], {"late/mine": 1.0})
    assert math_match.timeout_score == 0.0


def test_it_is_registered_and_runs_in_processes_of_its_own():
    config = RuleConfig(function="math_match", arguments={"column": "answer"})
    rows = table([r"\boxed{0.50}", "1/3"], answer=[r"\frac{1}{2}", r"\frac{1}{2}"])
    assert rule_scores("mine", config, rows) == ([1.0, 0.0], {"late/mine": 0.0})


def test_a_row_without_an_answer_is_found_before_the_run():
    rows = [{"ground_truth": r"\pi"}, {"ground_truth": None}]
    assert math_match.check(rows) == [None, "'ground_truth' is missing or null"]
