"""Rules that abstain, and responses that are cut, through the command line on the tiny run."""

import json
from pathlib import Path

import pytest

from pipeline.run.commits import require_record
from pipeline.run.directory import load_run
from pipeline.run.schemas import REWARD, ROLLOUT
from pipeline.run.shards import read_shard
from pipeline.run.tasks import Stage, Task
from tests.support import tiny

RULES = """
def length(*, responses, **columns):
    return [len(r) / 10 for r in responses]

def vowels(*, responses, **columns):
    return [None if sum(map(ord, r)) % 3 else float(sum(c in "aeiou" for c in r)) for r in responses]

def picky(*, responses, **columns):
    return [None if sum(map(ord, r)) % 2 else 1.0 for r in responses]

def silent(*, responses, **columns):
    return [None for r in responses]
"""
GROUPS = (
    "reward=rule",
    "algorithm=grpo",
    "rollout.samples_per_prompt=4",
    "rollout.temperature=1.0",
    "data.prompts_per_iteration=4",
)


@pytest.fixture
def run(models, slurm_ppo, tmp_path):
    """``slurm-ppo run`` with a function of the user's as component ``rule``, and further settings."""
    (tmp_path / "my_rules.py").write_text(RULES)

    def call(function: str, *more: str):
        given = (*GROUPS, f"reward.components.rule.function=my_rules:{function}", *more)
        return slurm_ppo("run", *tiny.overrides(models, tmp_path / "run", *given), cwd=tmp_path)

    return call


def rows_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def responses_of(run_dir: Path, iteration: int) -> list[dict]:
    """Rows of an iteration's rollout and reward shards, side by side."""
    paths, found = load_run(run_dir).paths, []
    for shard in range(2):
        rollout, reward = (
            read_shard(paths, require_record(paths, Task(iteration, stage, shard)), schema).to_pylist()
            for stage, schema in ((Stage.ROLLOUT, ROLLOUT), (Stage.REWARD, REWARD))
        )
        found += [one | other for one, other in zip(rollout, reward, strict=True)]
    return found


def test_a_rule_that_returns_none_leaves_rows_to_the_other_components_or_masks_them(run, tmp_path):
    done = run("vowels", "+reward.components.picky={kind: rule, function: 'my_rules:picky', weight: 3}")
    assert done.returncode == 0, done.stderr
    for iteration, row in enumerate(rows_of(tmp_path / "run"), 1):
        found = responses_of(tmp_path / "run", iteration)
        for one in found:
            vowels, picky = one["reward/rule"], one["reward/picky"]
            letters = sum(map(ord, one["response_text"]))
            assert (vowels is None, picky is None) == (letters % 3 > 0, letters % 2 > 0)
            if vowels is None and picky is None:
                assert (one["reward"], one["validity"]) == (None, "abstained")
                continue
            assert one["validity"] == "scored"
            both = None not in (vowels, picky)
            expected = vowels + 3 * picky if both else 4 * (picky if vowels is None else vowels)
            assert one["reward"] == pytest.approx(expected)
        abstained = sum(one["validity"] == "abstained" for one in found)
        assert abstained > 0
        assert row["validity/scored"] == 16 - abstained
        assert row["validity/abstained"] == row["reward/unscored"] == abstained
        assert row["reward/rule/abstained"] == sum(one["reward/rule"] is None for one in found)
        assert row["reward/mean"] == pytest.approx(
            sum(one["reward"] for one in found if one["reward"] is not None) / (16 - abstained)
        )
    assert "Responses that do not count" in (tmp_path / "run" / "report.html").read_text()


def test_responses_that_were_cut_do_not_count_with_mask_truncated(run, tmp_path):
    done = run("length", "algorithm.mask_truncated=true", "iterations=1")
    assert done.returncode == 0, done.stderr
    found, (row,) = responses_of(tmp_path / "run", 1), rows_of(tmp_path / "run")
    by_reason = {"length": "truncated", "stop": "scored"}
    assert [one["validity"] for one in found] == [by_reason[one["finish_reason"]] for one in found]
    cut = sum(one["finish_reason"] == "length" for one in found)
    assert row["validity/truncated"] == row["reward/discarded"] == cut > 0
    assert row["response_length/clip_ratio"] == cut / 16


def test_rules_that_abstain_from_everything_end_the_run_with_a_line_that_says_so(run):
    done = run("silent")
    assert done.returncode == 2, done.stderr
    assert "iteration 1 has no response that counts (16 abstained): rules abstained from all" in done.stderr
    assert "Traceback" not in done.stderr
