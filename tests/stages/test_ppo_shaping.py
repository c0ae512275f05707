"""Reward shaping as pure functions: what must hold for any scores, lengths and groups."""

import pytest
import torch
from hypothesis import strategies as st

from pipeline.config.algorithm import ShapingConfig
from stages.ppo.math.shaping import (
    RunningMoments,
    ShapingInput,
    flat_groups,
    missing_eos_penalty,
    overlong_penalty,
    shaped_scores,
)
from tests.support.ppo_batches import for_any, numbers, seeds

scores_lists = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=12)


def moments_of(*parts: list[float]) -> RunningMoments:
    moments = RunningMoments()
    for part in parts:
        moments = moments.including(torch.tensor(part, dtype=torch.float64))
    return moments


@for_any(scores_lists, st.data())
def test_running_moments_do_not_depend_on_how_scores_arrive(scores, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(scores)), max_size=3)))
    parts = [scores[a:b] for a, b in zip([0, *cuts], [*cuts, len(scores)], strict=True)]
    found = moments_of(*parts)
    exact = torch.tensor(scores, dtype=torch.float64)
    assert found.count == len(scores)
    assert found.mean == pytest.approx(float(exact.mean()), rel=1e-9, abs=1e-9)
    if len(scores) > 1 and float(exact.std()) > 1e-3:
        assert found.std == pytest.approx(float(exact.std()), rel=1e-6)


@pytest.mark.parametrize("parts", [[], [[]], [[3.0]], [[3.0], []], [[2.0, 2.0], [2.0]]])
def test_a_deviation_that_is_not_known_or_is_0_divides_nothing(parts):
    assert moments_of(*parts).std == 1


def test_normalising_does_not_take_rounding_for_a_difference_of_equal_scores():
    scores = torch.full((7,), 0.1)
    moments = RunningMoments().including(scores).including(scores)
    outcome = ShapingInput(scores, torch.ones(7), torch.ones(7, dtype=torch.bool))
    assert bool((shaped_scores(outcome, moments, ShapingConfig(normalize=True), 8) == 0).all())


@for_any(st.integers(1, 40), st.data(), st.floats(0, 3))
def test_the_overlong_penalty_grows_from_0_at_the_buffer_to_all_of_it_at_the_limit(limit, data, penalty):
    buffer = data.draw(st.integers(1, limit))
    found = overlong_penalty(torch.arange(0, limit + 4).double(), limit, buffer, penalty)
    assert bool((found[: limit - buffer + 1] == 0).all())
    assert bool((found.diff() >= 0).all())
    assert found[limit:].tolist() == pytest.approx([penalty] * 4)
    assert float(found[limit - 1]) == pytest.approx(penalty * (buffer - 1) / buffer)


@for_any(st.lists(st.booleans(), max_size=8), st.floats(0, 3))
def test_only_responses_that_did_not_end_by_themselves_pay_for_it(has_ended, penalty):
    found = missing_eos_penalty(torch.tensor(has_ended, dtype=torch.bool), penalty)
    assert found.tolist() == pytest.approx([0 if ended else penalty for ended in has_ended])


ALL = ShapingConfig(
    normalize=True, clip=1.5, missing_eos_penalty=0.5, overlong_buffer=3, overlong_penalty=0.25
)


@for_any(st.integers(1, 8), seeds, st.randoms())
def test_shaped_scores_follow_their_rows_and_stay_within_clip_and_penalties(rows, seed, random):
    scores, order = 10 * numbers(rows, seed), list(range(rows))
    random.shuffle(order)
    outcome = ShapingInput(scores, torch.arange(rows).double() + 2, numbers(rows, seed + 1) > 0)
    moments = RunningMoments().including(scores)
    found = shaped_scores(outcome, moments, ALL, max_new_tokens=9)
    assert torch.equal(shaped_scores(outcome.select(order), moments, ALL, 9), found[order])
    assert bool((found.abs() <= 1.5 + 0.5 + 0.25).all())


def test_shaping_that_nobody_asked_for_leaves_scores_as_they_are():
    scores = torch.tensor([-3.0, 0.0, 7.5])
    outcome = ShapingInput(scores, torch.full((3,), 99.0), torch.zeros(3, dtype=torch.bool))
    assert torch.equal(shaped_scores(outcome, RunningMoments(), ShapingConfig(), 9), scores)


@for_any(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=10))
def test_flat_groups_are_those_of_several_rows_with_one_score(rows):
    groups = torch.unique(torch.tensor([group for group, _ in rows]), return_inverse=True)[1]
    found = flat_groups(torch.tensor([float(score) for _, score in rows]), groups)
    for row, (group, _) in enumerate(rows):
        scores = [score for other, score in rows if other == group]
        assert bool(found[row]) == (len(scores) > 1 and len(set(scores)) == 1)
