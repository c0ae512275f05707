"""PPO's formulas beyond the golden numbers: what must hold for any rewards, masks and splits."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.algorithmconfig import AlgorithmConfig, KLConfig, KLController, KLEstimator, LossAggregation
from stages.ppo.advantages import fraction_of_flat_groups, gae, grpo, rloo
from stages.ppo.kl import kl_per_token, next_kl_coef
from stages.ppo.losses import Counts, aggregate, policy_loss, token_entropy, token_log_probs, value_loss
from stages.ppo.masked import NoValidTokens, masked_mean, masked_sum, masked_var, masked_whiten

NAN = math.nan


@st.composite
def masks(draw, min_tokens=1):
    """[B, T] with padding, holes and empty rows, but at least ``min_tokens`` valid ones."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    bits = draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    assume(sum(bits) >= min_tokens)
    return torch.tensor(bits).view(rows, columns)


def numbers(mask, seed):
    return torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


seeds = st.integers(0, 2**31)


@given(masks(), seeds, st.sampled_from(list(LossAggregation)), st.data())
def test_the_loss_does_not_depend_on_how_a_mini_batch_is_split(mask, seed, mode, data):
    loss, counts = numbers(mask, seed), Counts.of(mask, scale=7)
    part = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(mask), max_size=len(mask))))
    parts = [aggregate(loss[part == i], mask[part == i], mode, counts) for i in range(3)]
    assert float(sum(parts)) == pytest.approx(float(aggregate(loss, mask, mode, counts)), abs=1e-9)


@given(masks(), seeds, st.sampled_from(list(LossAggregation)))
def test_loss_and_gradient_ignore_what_is_outside_the_mask_even_nan(mask, seed, mode):
    clean = numbers(mask, seed).requires_grad_()
    counts = Counts.of(mask, scale=7)
    expected = aggregate(clean, mask, mode, counts)
    (gradient,) = torch.autograd.grad(expected, clean)
    dirty = torch.where(mask, clean.detach(), NAN).requires_grad_()
    found = aggregate(dirty, mask, mode, counts)
    (dirty_gradient,) = torch.autograd.grad(found, dirty)
    assert float(found.detach()) == float(expected.detach())
    assert torch.equal(gradient, dirty_gradient)
    assert bool((dirty_gradient[~mask] == 0).all())


@given(masks(min_tokens=2), seeds)
def test_statistics_ignore_what_is_outside_the_mask_even_nan(mask, seed):
    clean = numbers(mask, seed)
    dirty = torch.where(mask, clean, NAN)
    for statistic in (masked_sum, masked_mean, masked_var):
        assert float(statistic(dirty, mask)) == float(statistic(clean, mask))
    assert torch.equal(masked_whiten(dirty, mask)[mask], masked_whiten(clean, mask)[mask])


@given(masks(min_tokens=2), seeds)
def test_whitened_values_have_mean_0_and_variance_1(mask, seed):
    white = masked_whiten(numbers(mask, seed), mask)[mask]
    assert float(white.mean()) == pytest.approx(0, abs=1e-5)
    assert float(white.var()) == pytest.approx(1, rel=1e-3)


def test_whitening_equal_values_gives_zeros_not_nan():
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert torch.equal(masked_whiten(torch.full((2, 3), 4.0), mask), torch.zeros(2, 3))


def test_whitening_one_token_is_a_clear_error():
    mask = torch.tensor([[True, False]])
    with pytest.raises(NoValidTokens, match="at least 2 valid tokens, and the batch has 1"):
        masked_whiten(torch.ones(1, 2), mask)


def test_a_mini_batch_without_a_token_of_the_policy_is_a_clear_error():
    with pytest.raises(NoValidTokens, match="none of the 3 responses has a token that the policy wrote"):
        Counts.of(torch.zeros(3, 4, dtype=torch.bool), scale=4)


def test_empty_rows_are_no_sequences():
    counts = Counts.of(torch.tensor([[True, True], [False, False]]), scale=2)
    assert (counts.tokens, counts.sequences) == (2, 1)


@given(masks(), seeds)
def test_gae_without_discount_is_reward_to_go_minus_value(mask, seed):
    rewards, values = numbers(mask, seed) * mask, numbers(mask, seed + 1)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(returns[mask], to_go[mask])
    torch.testing.assert_close(advantages[mask], (to_go - values)[mask])


@given(masks(), seeds, st.floats(0, 1), st.floats(0, 1))
def test_gae_ignores_values_and_rewards_that_are_not_the_policys(mask, seed, gamma, lam):
    rewards, values = numbers(mask, seed), numbers(mask, seed + 1)
    expected = gae(rewards, values, mask, gamma, lam)
    dirty = gae(torch.where(mask, rewards, NAN), torch.where(mask, values, NAN), mask, gamma, lam)
    for ours, other in zip(dirty, expected, strict=True):
        assert torch.equal(ours[mask], other[mask])


@given(masks(), seeds, st.floats(0, 1), st.floats(0, 1))
def test_gae_over_a_hole_is_gae_of_the_tokens_side_by_side(mask, seed, gamma, lam):
    rewards, values = numbers(mask, seed), numbers(mask, seed + 1)
    advantages, _ = gae(rewards, values, mask, gamma, lam)
    for row in range(len(mask)):
        if not mask[row].any():
            continue
        kept = mask[row]
        alone, _ = gae(
            rewards[row][kept][None], values[row][kept][None], torch.ones(1, int(kept.sum())) > 0, gamma, lam
        )
        torch.testing.assert_close(advantages[row][kept], alone[0])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5)), min_size=1, max_size=12), st.randoms())
def test_group_estimators_ignore_the_order_of_rows(rows, random):
    def advantages(rows):
        dense = {g: i for i, g in enumerate(dict.fromkeys(g for g, _ in rows))}
        groups = torch.tensor([dense[g] for g, _ in rows])
        scores = torch.tensor([float(s) for _, s in rows], dtype=torch.float64)
        mask = torch.ones(len(rows), 2, dtype=torch.bool)
        return torch.stack(
            [rloo(scores, groups, mask), grpo(scores, groups, mask, True), grpo(scores, groups, mask, False)]
        )

    order = list(range(len(rows)))
    random.shuffle(order)
    torch.testing.assert_close(advantages([rows[i] for i in order]), advantages(rows)[:, order])


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6))
def test_advantages_of_a_group_sum_to_zero(scores):
    mask, groups = torch.ones(len(scores), 1, dtype=torch.bool), torch.zeros(len(scores), dtype=torch.long)
    values = torch.tensor(scores, dtype=torch.float64)
    assert float(rloo(values, groups, mask).sum()) == pytest.approx(0, abs=1e-9)
    assert float(grpo(values, groups, mask, False).sum()) == pytest.approx(0, abs=1e-9)


def test_equal_rewards_teach_nothing_and_are_reported():
    scores, groups = torch.full((4,), 0.7), torch.tensor([0, 0, 1, 1])
    mask = torch.ones(4, 3, dtype=torch.bool)
    for advantages in (rloo(scores, groups, mask), grpo(scores, groups, mask, True)):
        torch.testing.assert_close(advantages, torch.zeros(4, 3), rtol=0, atol=1e-6)
    assert fraction_of_flat_groups(scores, groups) == 1
    assert fraction_of_flat_groups(torch.tensor([0.7, 0.7, 0.1, 0.2]), groups) == 0.5


@pytest.mark.parametrize("reward", [0.1, 0.7, -3.3, 1234.567, 1e6])
def test_rounding_of_a_mean_is_not_taken_for_a_difference_of_equal_rewards(reward):
    scores, groups = torch.full((3,), reward), torch.zeros(3, dtype=torch.long)
    mask = torch.ones(3, 1, dtype=torch.bool)
    assert float(grpo(scores, groups, mask, True).abs().max()) < 1e-3


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    algorithm = AlgorithmConfig(dual_clip=3.0)
    log_ratio = torch.tensor([[5.0, 5.0, 0.0, -5.0]])
    advantages = torch.tensor([[-1.0, 1.0, -1.0, -1.0]])
    result = policy_loss(log_ratio, torch.zeros(1, 4), advantages, algorithm)
    assert result.loss.tolist() == [[3.0, pytest.approx(-1.2), 1.0, pytest.approx(0.8)]]
    assert result.dual_clipped.tolist() == [[True, False, False, False]]
    assert result.clipped_high.tolist() == [[False, True, False, False]]
    assert result.clipped_low.tolist() == [[False, False, False, True]]


@given(st.floats(-1e4, 1e4), st.floats(-100, 100))
def test_no_log_ratio_makes_the_loss_infinite(log_ratio, advantage):
    result = policy_loss(
        torch.tensor([[log_ratio]]), torch.zeros(1, 1), torch.tensor([[advantage]]), AlgorithmConfig()
    )
    assert bool(torch.isfinite(result.loss).all())
    assert bool((result.ratio > 0).all())


def test_asymmetric_clipping_uses_each_bound_on_its_side():
    algorithm = AlgorithmConfig(clip_range_low=0.1, clip_range_high=0.3)
    log_ratio = torch.tensor([[1.2, 1.4, 0.95, 0.8]]).log()
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    loss = policy_loss(log_ratio, torch.zeros(1, 4), advantages, algorithm).loss
    torch.testing.assert_close(loss, torch.tensor([[-1.2, -1.3, 0.95, 0.9]]))


def test_a_value_may_not_gain_by_moving_further_than_its_range():
    loss, is_clipped = value_loss(torch.tensor([1.0, 0.1]), torch.tensor([1.0, 1.0]), torch.zeros(2), 0.2)
    torch.testing.assert_close(loss, torch.tensor([0.5 * 0.8**2, 0.5 * 0.9**2]))
    assert is_clipped.tolist() == [True, False]


@given(st.floats(-50, 50), st.floats(-50, 50))
def test_kl_estimators_are_zero_at_the_reference_and_finite_everywhere(one, other):
    here, there = torch.tensor([one]), torch.tensor([other])
    for estimator in KLEstimator:
        assert float(kl_per_token(here, here, estimator)) == 0
        value = float(kl_per_token(here, there, estimator))
        assert math.isfinite(value)
        assert estimator is KLEstimator.K1 or value >= -1e-6  # rounding of exp(x) - x - 1


def test_kl_estimators_agree_with_the_true_divergence():
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.log_softmax(torch.randn(8, generator=generator) / 2, -1) for _ in range(2))
    truth = float((policy.exp() * (policy - reference)).sum())
    drawn = torch.multinomial(policy.exp(), 200_000, replacement=True, generator=generator)
    for estimator in (KLEstimator.K1, KLEstimator.K3):
        kl = kl_per_token(policy[drawn], reference[drawn], estimator)
        assert float(kl.mean()) == pytest.approx(truth, rel=0.03)


@given(st.floats(0, 1), st.floats(-100, 100), st.integers(1, 5000))
def test_the_controller_moves_towards_the_target_and_never_below_zero(coef, kl, responses):
    config = KLConfig(controller=KLController.ADAPTIVE, target=6.0, horizon=10000)
    following = next_kl_coef(coef, kl, responses, config)
    assert following >= 0
    assert (following - coef) * (kl - 6.0) >= 0
    assert abs(following - coef) <= 0.2 * coef * responses / 10000 + 1e-12
    assert next_kl_coef(coef, kl, responses, KLConfig(controller=KLController.FIXED)) == coef


@settings(max_examples=20)
@given(seeds, st.floats(0.2, 3))
def test_log_probabilities_and_entropy_are_those_of_the_tempered_distribution(seed, temperature):
    logits = 5 * torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(seed))
    tokens = torch.randint(0, 11, (2, 3), generator=torch.Generator().manual_seed(seed))
    found = token_log_probs(logits / temperature, tokens)
    entropy = token_entropy(logits / temperature)
    exact = torch.distributions.Categorical(logits=logits / temperature)
    torch.testing.assert_close(found, exact.log_prob(tokens), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, exact.entropy(), atol=1e-5, rtol=1e-5)
