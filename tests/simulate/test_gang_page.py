"""Gangs against staged jobs: the page has what its model says, and the model what is published."""

import re
from dataclasses import replace

import pytest

from benchmarks.gang import Site, drawn, ends, rollout, splits, staleness_one, tables, ways
from benchmarks.gang_cases import CASES
from tests.support import ROOT

PAGE = ROOT / "docs/explanation/gang.md"
COMPARED, PPO, ERRORS, ASSUMED = range(4)


@pytest.mark.parametrize("number", [COMPARED, PPO, ASSUMED])
def test_the_page_has_the_tables_of_the_script(number):
    assert "\n".join(tables(Site())[number]) in PAGE.read_text()


def test_the_page_says_how_far_the_script_is_off():
    """At the published split of GPUs, and at the best one that the model finds."""
    found = [re.findall(r"\(([+-]\d+)%\)", row) for row in tables(Site())[ERRORS][2:]]
    assert len(found) == 6
    for errors in zip(*found, strict=True):
        percent = sorted(map(int, errors))
        assert f"by {percent[0]:+d} to {percent[-1]:+d} %" in PAGE.read_text()


def test_its_picture_is_what_the_script_draws():
    assert PAGE.with_name("gang.svg").read_text() == drawn(Site())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_generation_on_all_gpus_takes_what_is_published(case):
    assert rollout(case, case.gpus) == pytest.approx(case.generation)
    assert case.generation + case.log_probs + case.training <= case.step * 1.001
    assert all(rollout(case, gpus) >= case.generation * 0.999 for gpus in splits(case))


def test_an_engine_gives_each_running_response_a_token_a_step():
    case = replace(CASES[0], step_seconds=1.0, per_running=0.5)
    assert ends([2, 4], case, most_running=2) == [2 * 2.0, 2 * 2.0 + 2 * 1.5]
    assert ends([2, 4], case, most_running=1) == [2 * 1.5, 2 * 1.5 + 4 * 1.5]


def test_faster_storage_and_no_reward_model_make_staged_jobs_better():
    case = CASES[-1]
    assert staleness_one(case, Site(storage=20.0), 16) < staleness_one(case, Site(storage=1.0), 16)
    without = replace(case, reward_seconds=0.0, reward_gpus=0)
    assert ways(without, Site())["staleness 1"].gpu_time < ways(case, Site())["staleness 1"].gpu_time
