"""`make quickstart`, step by step: the demo is made, the run learns, the judge would say if it did not."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import ROOT, reportrun
from tests.support.processes import script

EXAMPLE = ROOT / "examples/quickstart"
LESSON = (
    "iterations=8",
    "evaluate.every=8",
    "data.prompts_per_iteration=96",
    "update.learning_rate=1e-3",
    "algorithm.kl.coef=0.02",
)
"""Shorter than the quickstart, and faster: it may drift further from where it began."""
SMALL = ("--reviews", 3000, "--prompts", 1000)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory) -> Path:
    """A folder with the demo where experiment=quickstart looks for it."""
    folder = tmp_path_factory.mktemp("workshop")
    made = script(EXAMPLE / "make_demo.py", "--out", folder / ".cache" / "quickstart", *SMALL)
    assert made.code == 0, made.log
    return folder


def test_the_run_learns_and_so_does_the_rule_it_never_sees(slurm_ppo, environment, workshop, tmp_path):
    paths = environment | {"PYTHONPATH": str(ROOT)}
    words = ("run", "experiment=quickstart", f"run_dir={tmp_path / 'run'}", *LESSON)
    done = slurm_ppo(*words, cwd=workshop, env=paths)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^ +\d+ ", done.stdout, re.MULTILINE)) >= 8, "a row per iteration"
    assert f"run directory: {tmp_path / 'run'}" in done.stdout
    assert "report.html" in done.stdout
    assert (tmp_path / "run" / "report.html").stat().st_size > 1_000_000
    verdict = script(EXAMPLE / "judge.py", tmp_path / "run")
    assert verdict.code == 0, verdict.log
    gains = re.findall(r"^(reward-model score|hidden rule) .* (\S+)$", verdict.log, re.MULTILINE)
    assert len(gains) == 2
    assert min(float(gain) for _, gain in gains) >= 0.5


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
    verdict = script(EXAMPLE / "judge.py", tmp_path / "run")
    assert verdict.code == code, verdict.log
    assert ("has not learned" in verdict.log) is bool(code)


def test_the_demo_is_made_once(workshop, monkeypatch):
    demo = workshop / ".cache" / "quickstart"
    monkeypatch.syspath_prepend(EXAMPLE)
    import make_demo

    choices = [make_demo.Choice(*numbers) for numbers in ((0, 3000, 1000), (1, 3000, 1000), (0, 4500, 2000))]
    assert [make_demo.is_made(demo, choice) for choice in choices] == [True, False, False]
    before = (demo / "policy" / "model.safetensors").stat().st_mtime_ns
    again = script(EXAMPLE / "make_demo.py", "--out", demo, *SMALL)
    assert again.code == 0
    assert "already" in again.log
    assert (demo / "policy" / "model.safetensors").stat().st_mtime_ns == before
