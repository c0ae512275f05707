"""The quickstart's judge, and the demo that it is made of once."""

from collections.abc import Sequence

import pytest

from stages.demo import make
from tests.support import ROOT, reportrun
from tests.support.processes import script

JUDGE, MAKE = ROOT / "stages/demo/judge.py", ROOT / "stages/demo/make.py"
SMALL = ("--reviews", 300, "--prompts", 100)

DULL = [" was dull.", " was dull and weak.", " was flat."]
WARM = [" was warm.", " was warm and bright.", " was lovely."]


@pytest.mark.parametrize(
    ("texts", "rewards", "code"),
    [
        ((DULL, WARM), ([-1.0, 0.0, 1.0], [1.0, 2.0, 3.0]), 0),
        ((DULL, DULL), ([-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]), 1),
        ((DULL, DULL), ([-1.0, 0.0, 1.0], [1.0, 2.0, 3.0]), 1),
        ((DULL, WARM), ([-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]), 1),
        ((WARM, DULL), ([1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]), 1),
    ],
    ids=["learnt", "nothing", "the score alone", "the rule alone", "unlearnt"],
)
def test_the_judge_says_so_unless_both_scores_have_risen(
    tmp_path, texts: Sequence[list[str]], rewards: Sequence[list[float]], code: int
):
    run = reportrun.make_run(tmp_path / "run", iterations=6)
    for iteration in range(1, 7):
        part = int(iteration > 3)
        prompts = ["The music"] * 3
        reportrun.commit_shard(
            run, iteration, 0, responses=texts[part], rewards=rewards[part], prompts=prompts
        )
    verdict = script(JUDGE, tmp_path / "run")
    assert verdict.code == code, verdict.log
    assert ("has not learned" in verdict.log) is bool(code)


def test_the_demo_is_made_once(tmp_path):
    demo = tmp_path / "demo"
    made = script(MAKE, "--out", demo, *SMALL)
    assert made.code == 0, made.log
    choices = [make.DemoSize(*numbers) for numbers in ((0, 300, 100), (1, 300, 100), (0, 400, 200))]
    assert [make.is_made(demo, choice) for choice in choices] == [True, False, False]
    before = (demo / "policy" / "model.safetensors").stat().st_mtime_ns
    again = script(MAKE, "--out", demo, *SMALL)
    assert again.code == 0
    assert "already" in again.log
    assert (demo / "policy" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("place", ["a file", "something else"])
def test_a_demo_in_the_place_of_something_else_is_refused(tmp_path, place):
    demo = tmp_path / "demo"
    if place == "a file":
        (tmp_path / "demo").write_text("mine")
        demo = demo / "below"
    else:
        demo.mkdir()
        (demo / "mine").write_text("mine")
    made = script(MAKE, "--out", demo, *SMALL)
    assert made.code == 2
    assert made.log.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in made.log
