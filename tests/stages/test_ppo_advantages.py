"""Advantage estimators beyond the golden numbers: what must hold for any rewards, masks and groups."""

import pytest
import torch
from hypothesis import strategies as st

from stages.ppo.math.advantages import (
    gae,
    grpo,
    length_adaptive_lambda,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from stages.ppo.math.masked import NoValidTokens
from tests.support.ppo_batches import Batch, batches, for_any


def total(batch: Batch) -> torch.Tensor:
    return torch.where(batch.mask, batch.rewards, 0.0).sum(dim=1)


WHITENED = {
    "reinforce++": lambda b: reinforce_plus_plus(b.rewards, b.mask, 0.9)[0],
    "reinforce++-baseline": lambda b: reinforce_plus_plus_baseline(total(b), b.groups, b.mask),
}
BY_GROUP = {
    "grpo": lambda b: grpo(total(b), b.groups, b.mask, True),
    "dr-grpo": lambda b: grpo(total(b), b.groups, b.mask, False),
    "rloo": lambda b: rloo(total(b), b.groups, b.mask),
}
ZERO_OUTSIDE = BY_GROUP | WHITENED | {"remax": lambda b: remax(b.rewards, b.baselines, b.mask, 0.9)}
ALL = ZERO_OUTSIDE | {
    "gae": lambda b: gae(b.rewards, b.values, b.mask, 0.99, 0.9)[0],
    "returns": lambda b: gae(b.rewards, b.values, b.mask, 0.99, 0.9)[1],
}

any_estimator = pytest.mark.parametrize("estimator", ALL.values(), ids=ALL.keys())
enough = batches(min_tokens=2)  # to whiten


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


@any_estimator
@for_any(batch=enough)
def test_advantages_are_finite_and_ignore_what_is_not_the_policys_even_nan(estimator, batch):
    found = estimator(batch.dirty())[batch.mask]
    assert bool(torch.isfinite(found).all())
    assert torch.equal(found, estimator(batch)[batch.mask])


@pytest.mark.parametrize("estimator", ZERO_OUTSIDE.values(), ids=ZERO_OUTSIDE.keys())
@for_any(batch=enough)
def test_advantages_are_zero_where_the_token_is_not_the_policys(estimator, batch):
    assert bool((estimator(batch.dirty())[~batch.mask] == 0).all())


@any_estimator
@for_any(batch=enough, random=st.randoms())
def test_advantages_follow_their_rows(estimator, batch, random):
    order = list(range(len(batch.mask)))
    random.shuffle(order)
    shuffled = batch.rows(order)
    assert_close(estimator(shuffled)[shuffled.mask], estimator(batch)[order][shuffled.mask])


@any_estimator
@for_any(batch=enough, data=st.data())
def test_an_observation_between_tokens_changes_no_advantage(estimator, batch, data):
    longer = batch.with_observation(data.draw(st.integers(0, batch.mask.shape[1])))
    assert_close(estimator(longer)[longer.mask], estimator(batch)[batch.mask])


@any_estimator
@for_any(batch=enough)
def test_a_row_without_tokens_changes_no_other_row(estimator, batch):
    more = batch.with_empty_row()
    assert_close(estimator(more)[more.mask], estimator(batch)[batch.mask])


@pytest.mark.parametrize("estimator", sorted(ALL.keys() - WHITENED.keys()))
@pytest.mark.parametrize("rows", [1, 3])
def test_without_any_token_of_the_policys_nothing_is_nan(estimator, rows):
    mask, zeros = torch.zeros(rows, 2, dtype=torch.bool), torch.zeros(rows, 2)
    batch = Batch(mask, zeros, zeros, torch.arange(rows), torch.ones(rows))
    assert bool(torch.isfinite(ALL[estimator](batch)).all())


@pytest.mark.parametrize("estimator", WHITENED.values(), ids=WHITENED.keys())
def test_whitened_advantages_of_one_token_are_a_clear_error(estimator):
    one = torch.ones(1, 1)
    with pytest.raises(NoValidTokens, match="at least 2 valid tokens, and the batch has 1"):
        estimator(Batch(one.bool(), one, one, torch.zeros(1, dtype=torch.long), one[0]))


def test_one_response_of_one_token():
    one = torch.ones(1, 1)
    batch = Batch(one.bool(), 3 * one, one, torch.zeros(1, dtype=torch.long), 2 * one[0])
    found = {name: float(ALL[name](batch)) for name in ALL.keys() - WHITENED.keys()}
    alone = {"grpo": 3.0, "dr-grpo": 3.0, "rloo": 3.0}  # alone in its group: there is no baseline
    assert found == alone | {"remax": 1.0, "gae": 2.0, "returns": 3.0}


@for_any(batches())
def test_gae_without_discount_is_reward_to_go_minus_value(batch):
    advantages, returns = gae(batch.rewards, batch.values, batch.mask, gamma=1.0, lam=1.0)
    to_go = (batch.rewards * batch.mask).flip(1).cumsum(1).flip(1)
    assert_close(returns[batch.mask], to_go[batch.mask])
    assert_close(advantages[batch.mask], (to_go - batch.values)[batch.mask])


@for_any(batches(), st.floats(0, 1))
def test_gae_with_lambda_0_is_the_temporal_difference(batch, gamma):
    advantages, _ = gae(batch.rewards, batch.values, batch.mask, gamma, lam=0.0)
    for row, kept in enumerate(batch.mask):
        rewards, values = batch.rewards[row][kept], batch.values[row][kept]
        following = torch.cat([values[1:], torch.zeros(1).double()])[: len(values)]
        assert_close(advantages[row][kept], rewards + gamma * following - values)


@for_any(batches(), st.integers(1, 400))
def test_each_response_may_have_a_lambda_of_its_own_that_grows_with_its_length(batch, alpha):
    lambdas = length_adaptive_lambda(batch.mask, alpha / 20)
    advantages, returns = gae(batch.rewards, batch.values, batch.mask, 0.9, lambdas)
    for row, kept in enumerate(batch.mask):
        one = [each[row : row + 1] for each in (batch.rewards, batch.values, batch.mask)]
        lam = float(lambdas[row])
        assert lam == pytest.approx(max(0.0, 1 - 20 / (alpha * max(1, int(kept.sum())))), abs=1e-6)
        for found, expected in zip((advantages, returns), gae(*one, 0.9, lam), strict=True):
            assert_close(found[row][kept], expected[0][kept])


@for_any(batches(), st.floats(0, 1))
def test_remax_is_the_discounted_reward_to_come_less_the_greedy_score(batch, gamma):
    advantages = remax(batch.rewards, batch.baselines, batch.mask, gamma)
    for row, kept in enumerate(batch.mask):
        rewards = batch.rewards[row][kept]
        steps = range(len(rewards))
        to_come = [sum(gamma ** (u - t) * float(rewards[u]) for u in steps if u >= t) for t in steps]
        expected = torch.tensor(to_come, dtype=torch.float64) - batch.baselines[row]
        assert_close(advantages[row][kept], expected)


@for_any(batches(min_tokens=2), st.floats(0, 1))
def test_reinforce_plus_plus_whitens_the_returns_that_remax_has_before_its_baseline(batch, gamma):
    advantages, returns = reinforce_plus_plus(batch.rewards, batch.mask, gamma)
    assert_close(returns, remax(batch.rewards, torch.zeros_like(batch.baselines), batch.mask, gamma))
    assert float(advantages[batch.mask].mean()) == pytest.approx(0, abs=1e-3)


GROUP_FUNCTIONS = {
    "grpo": lambda *rows: grpo(*rows, True),
    "dr-grpo": lambda *rows: grpo(*rows, False),
    "rloo": rloo,
}
pairs_of_prompts = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.integers(-5, 5)), min_size=1)


@pytest.mark.parametrize("estimator", GROUP_FUNCTIONS.values(), ids=GROUP_FUNCTIONS.keys())
@for_any(prompts=pairs_of_prompts)
def test_what_both_samples_of_a_prompt_get_teaches_nothing(estimator, prompts):
    scores = torch.tensor([pair[:2] for pair in prompts], dtype=torch.float64)
    for_both = torch.tensor([shift for *_, shift in prompts]).unsqueeze(1)
    groups = torch.arange(len(prompts)).repeat_interleave(2)
    mask = torch.ones(len(groups), 1, dtype=torch.bool)
    found = estimator((scores + for_both).flatten(), groups, mask)
    torch.testing.assert_close(found, estimator(scores.flatten(), groups, mask), rtol=0, atol=1e-6)


@for_any(st.lists(st.floats(-5, 5), min_size=2, max_size=6))
def test_advantages_of_a_group_sum_to_zero(scores):
    mask, groups = torch.ones(len(scores), 1, dtype=torch.bool), torch.zeros(len(scores), dtype=torch.long)
    values = torch.tensor(scores, dtype=torch.float64)
    for advantages in (rloo(values, groups, mask), grpo(values, groups, mask, False)):
        assert float(advantages.sum()) == pytest.approx(0, abs=1e-9)
    assert float(reinforce_plus_plus_baseline(values, groups, mask).sum()) == pytest.approx(0, abs=1e-4)


@for_any(st.lists(st.integers(-9, 9), min_size=2, max_size=6))
def test_rloo_is_dr_grpo_times_n_over_n_less_1(scores):
    mask, groups = torch.ones(len(scores), 1, dtype=torch.bool), torch.zeros(len(scores), dtype=torch.long)
    values = torch.tensor(scores, dtype=torch.float64)
    factor = len(scores) / (len(scores) - 1)
    assert_close(rloo(values, groups, mask), factor * grpo(values, groups, mask, False))


@pytest.mark.parametrize("reward", [0.1, 0.7, -3.3, 1234.567, 1e6])
def test_rounding_of_a_mean_is_not_taken_for_a_difference_of_equal_rewards(reward):
    scores, groups = torch.full((3,), reward), torch.zeros(3, dtype=torch.long)
    mask = torch.ones(3, 2, dtype=torch.bool)
    for advantages in (
        grpo(scores, groups, mask, True),
        grpo(scores, groups, mask, False),
        rloo(scores, groups, mask),
        reinforce_plus_plus_baseline(scores, groups, mask),
    ):
        assert float(advantages.abs().max()) < 1e-3 * max(1, abs(reward) / 1e4)
