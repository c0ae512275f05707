"""The calculator example: arithmetic that is never evaluated as Python, and a run of real conversations."""

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.calculator.calculator import MAX_LETTERS, answer_to, calculate, right, step
from stages.generation.conversations import Conversation
from tests.support import ROOT
from tests.support.processes import script
from tests.support.tables import LONG

EXAMPLE = ROOT / "examples" / "calculator"

expressions = st.recursive(
    st.integers(0, 99).map(str),
    lambda part: st.tuples(part, st.sampled_from("+-*"), part).map("".join) | part.map(lambda p: f"({p})"),
    max_leaves=8,
)


@given(expressions)
def test_it_calculates_as_python_does(text):
    assert calculate(text) == eval(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("7 - -2", "9"),
        ("1/3 + 1/6", "1/2"),
        ("2*(3+4)/7", "2"),
        ("0.1+0.2", "3/10"),
        ("1/0", "error: division by zero"),
        ("", "error: unexpected the end"),
        ("2+", "error: unexpected the end"),
        ("2 2", "error: unexpected 2"),
        ("(1", "error: a parenthesis is not closed"),
        ("__import__('os')", "error: unexpected _"),
        ("9**9", "error: unexpected *"),
        ("٣+1", "error: unexpected ٣"),
        ("(" * 50 + "1" + ")" * 50, "error: too deep"),
        ("9" * MAX_LETTERS, "error: too large"),
        ("1+" * MAX_LETTERS, "error: too long"),
    ],
)
def test_what_the_tool_says(text, said):
    assert answer_to(text) == said


@given(st.text(max_size=300) | st.text("0123456789+-*/(). ", max_size=300))
def test_whatever_the_policy_writes_the_tool_answers(text):
    said = answer_to(text)
    assert said.startswith("error: ") or Fraction(said) == calculate(text)


def after(turn: str) -> Conversation:
    return Conversation("p", 0, "", None, [{"role": "assistant", "content": turn}], 1, {})


def test_a_turn_that_asks_for_nothing_ends_the_conversation():
    assert step(after("<calc>2*3</calc>")) == [{"role": "tool", "content": "6"}]
    assert step(after("let me see <calc>1+1</calc><calc>5</calc>")) == [{"role": "tool", "content": "2"}]
    assert step(after("6")) is None
    assert step(after("<calc>2*3")) is None


def test_the_last_turn_is_what_counts():
    said = ["6", " 6 ", "6.0", "12/2", "7", "six", "6 6", "1/0"]
    conversations = [[{"role": "assistant", "content": text}] for text in said]
    scores = right(response_messages=conversations, answer=["6"] * len(said), prompts=[], responses=[])
    assert scores == [1.0, 1.0, 1.0, 1.0, 0.0, -0.5, -0.5, -0.5]
    assert right(response_messages=[[]], answer=["6"]) == [-0.5]


@LONG
def test_the_example_runs_and_its_conversations_have_several_turns(slurm_ppo, environment, tmp_path):
    folder = tmp_path / ".cache" / "calculator"
    made = script(EXAMPLE / "make_calculator.py", "--out", folder, "--dialogues", 1200)
    assert made.code == 0, made.log
    words = ("--config-dir", EXAMPLE, "experiment=calculator", f"run_dir={tmp_path / 'run'}", "iterations=1")
    small = ("data.prompts_per_iteration=8", "evaluate.every=0", "data.heldout=null", "tracking=none")
    done = slurm_ppo("run", *words, *small, cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row["num_turns/mean"] > 1.5
    shown = script(EXAMPLE / "show.py", tmp_path / "run", "--count", 8)
    assert shown.code == 0, shown.log
    roles = [line.split(":")[0].strip() for line in shown.log.splitlines() if line.startswith("  ")]
    assert {"user", "assistant", "tool"} == set(roles)
    assert roles.count("user") == 8
