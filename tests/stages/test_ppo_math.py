"""PPO's losses, KL and statistics beyond the golden numbers: what holds for any numbers, masks, splits."""

import math

import pytest
import torch
from hypothesis import strategies as st

from pipeline.config.algorithm import (
    AlgorithmConfig,
    KLConfig,
    KLController,
    KLEstimator,
    KLPlacement,
    LossAggregation,
    PolicyLossName,
)
from stages.context import UserError
from stages.ppo.logits import AskedTokens, token_outputs
from stages.ppo.math.kl import kl_loss_per_token, kl_per_token, next_kl_coef
from stages.ppo.math.losses import Counts, aggregate, policy_loss, value_loss
from stages.ppo.math.masked import EPSILON, NoValidTokens, masked_mean, masked_sum, masked_var, masked_whiten
from tests.support.ppo_batches import NAN, for_any, masks, numbers, seeds

ALGORITHM = AlgorithmConfig(clip_range_low=0.2, clip_range_high=0.28, dual_clip=1.5)
any_aggregation = pytest.mark.parametrize("mode", list(LossAggregation))
any_kl = pytest.mark.parametrize("estimator", list(KLEstimator))


# Statistics


@for_any(masks(min_tokens=2), seeds)
def test_statistics_ignore_what_is_outside_the_mask_even_nan(mask, seed):
    clean = numbers(mask.shape, seed)
    dirty = torch.where(mask, clean, NAN)
    for statistic in (masked_sum, masked_mean, masked_var):
        assert float(statistic(dirty, mask)) == float(statistic(clean, mask))
    for shift_mean in (True, False):
        whitened = masked_whiten(dirty, mask, shift_mean)
        assert torch.equal(whitened[mask], masked_whiten(clean, mask, shift_mean)[mask])


@for_any(masks(min_tokens=2), seeds, st.integers(-9, 9))
def test_whitened_values_have_variance_1_around_0_or_around_their_mean(mask, seed, middle):
    values = numbers(mask.shape, seed) + middle
    for shift_mean, mean in ((True, 0.0), (False, float(values[mask].mean()))):
        white, before = masked_whiten(values, mask, shift_mean)[mask], float(values[mask].var())
        assert float(white.mean()) == pytest.approx(mean, abs=1e-3)
        assert float(white.var()) == pytest.approx(before / (before + EPSILON), rel=1e-3)


@for_any(masks(min_tokens=2), seeds, st.randoms())
def test_whitened_values_follow_their_rows(mask, seed, random):
    order = list(range(len(mask)))
    random.shuffle(order)
    values = numbers(mask.shape, seed)
    found = masked_whiten(values[order], mask[order])[mask[order]]
    torch.testing.assert_close(found, masked_whiten(values, mask)[order][mask[order]])


def test_whitening_equal_values_gives_zeros_not_nan():
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert torch.equal(masked_whiten(torch.full((2, 3), 4.0), mask), torch.zeros(2, 3))


@pytest.mark.parametrize("valid", [0, 1])
def test_whitening_fewer_than_two_tokens_is_a_clear_error(valid):
    mask = torch.tensor([[True, False]]) if valid else torch.zeros(1, 2, dtype=torch.bool)
    with pytest.raises(NoValidTokens, match=f"at least 2 valid tokens, and the batch has {valid}"):
        masked_whiten(torch.ones(1, 2), mask)


def test_the_mean_of_nothing_is_0():
    assert float(masked_mean(torch.full((2, 2), NAN), torch.zeros(2, 2, dtype=torch.bool))) == 0


# Aggregation


@any_aggregation
@for_any(mask=masks(), seed=seeds, data=st.data())
def test_the_loss_does_not_depend_on_how_a_mini_batch_is_split(mode, mask, seed, data):
    loss, counts = numbers(mask.shape, seed), Counts.of(mask, scale=7)
    part = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(mask), max_size=len(mask))))
    parts = [aggregate(loss[part == i], mask[part == i], mode, counts) for i in range(3)]
    assert float(sum(parts)) == pytest.approx(float(aggregate(loss, mask, mode, counts)), abs=1e-9)


@any_aggregation
@for_any(mask=masks(), seed=seeds)
def test_loss_and_gradient_ignore_what_is_outside_the_mask_even_nan(mode, mask, seed):
    clean = numbers(mask.shape, seed).requires_grad_()
    counts = Counts.of(mask, scale=7)
    expected = aggregate(clean, mask, mode, counts)
    (gradient,) = torch.autograd.grad(expected, clean)
    dirty = torch.where(mask, clean.detach(), NAN).requires_grad_()
    found = aggregate(dirty, mask, mode, counts)
    (dirty_gradient,) = torch.autograd.grad(found, dirty)
    assert float(found.detach()) == float(expected.detach())
    assert torch.equal(gradient, dirty_gradient)
    assert bool((dirty_gradient[~mask] == 0).all())


@any_aggregation
@for_any(mask=masks(), seed=seeds)
def test_rows_and_columns_without_tokens_add_nothing(mode, mask, seed):
    loss, counts = numbers(mask.shape, seed), Counts.of(mask, scale=7)
    wider = torch.nn.functional.pad(loss, (1, 2, 0, 1), value=NAN)
    wider_mask = torch.nn.functional.pad(mask, (1, 2, 0, 1), value=False)
    assert Counts.of(wider_mask, scale=7) == counts
    found = aggregate(wider, wider_mask, mode, counts)
    assert float(found) == pytest.approx(float(aggregate(loss, mask, mode, counts)), abs=1e-12)


@any_aggregation
@pytest.mark.parametrize("rows", [0, 2])
def test_a_micro_batch_without_tokens_is_worth_0_and_has_gradients_of_0(mode, rows):
    loss = torch.full((rows, 3), NAN).requires_grad_()
    share = aggregate(loss, torch.zeros(rows, 3, dtype=torch.bool), mode, Counts(10, 3, 7))
    (gradient,) = torch.autograd.grad(share, loss)
    assert float(share.detach()) == 0
    assert bool((gradient == 0).all())


@for_any(st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_means_of_one_token_responses_are_the_same(losses):
    loss = torch.tensor(losses, dtype=torch.float64).unsqueeze(1)
    mask = torch.ones_like(loss, dtype=torch.bool)
    means = set(LossAggregation) - {LossAggregation.TOKEN_SUM}
    for mode in means:
        found = float(aggregate(loss, mask, mode, Counts.of(mask, scale=1)))
        assert found == pytest.approx(sum(losses) / len(losses), abs=1e-6)


def test_a_mini_batch_without_a_token_of_the_policy_is_a_clear_error():
    with pytest.raises(NoValidTokens, match="none of the 3 responses has a token that the policy wrote"):
        Counts.of(torch.zeros(3, 4, dtype=torch.bool), scale=4)


def test_empty_rows_are_no_sequences():
    counts = Counts.of(torch.tensor([[True, True], [False, False]]), scale=2)
    assert (counts.tokens, counts.sequences) == (2, 1)


# Policy and value loss


def gradient_of(per_token, mask, *arguments):
    """Of the token-mean, to the first of the arguments."""
    first = arguments[0].clone().requires_grad_()
    loss = aggregate(
        per_token(first, *arguments[1:]), mask, LossAggregation.TOKEN_MEAN, Counts.of(mask, scale=1)
    )
    return torch.autograd.grad(loss, first)[0]


LOSSES = {
    "policy": lambda new, old, advantages, _: policy_loss(new, old, advantages, ALGORITHM).loss,
    "weighted": lambda new, old, advantages, w: policy_loss(new, old, advantages, ALGORITHM, w.abs()).loss,
    "value": lambda new, returns, old, _: value_loss(new, returns, old, 0.2)[0],
} | {f"kl {e}": lambda new, ref, *_, e=e: kl_loss_per_token(new, ref, e, e == "k1") for e in KLEstimator}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@for_any(mask=masks(), seed=seeds)
def test_a_token_of_nan_leaves_loss_and_gradient_of_the_others_as_they_are(loss, mask, seed):
    clean = [numbers(mask.shape, seed + i) for i in range(4)]
    dirty = [torch.where(mask, x, NAN) for x in clean]
    assert torch.equal(loss(*dirty)[mask], loss(*clean)[mask])
    expected, found = gradient_of(loss, mask, *clean), gradient_of(loss, mask, *dirty)
    assert bool(torch.isfinite(expected).all())
    assert torch.equal(found[mask], expected[mask])


@for_any(masks(), seeds)
def test_at_the_old_policy_the_ratio_is_1_and_the_gradient_is_the_advantage(mask, seed):
    old, advantages = numbers(mask.shape, seed), numbers(mask.shape, seed + 1)
    result = policy_loss(old, old, advantages, ALGORITHM)
    assert bool((result.ratio == 1).all())
    assert torch.equal(result.loss, -advantages)
    assert not (result.clipped_low | result.clipped_high | result.dual_clipped).any()
    gradient = gradient_of(lambda new: policy_loss(new, old, advantages, ALGORITHM).loss, mask, old)
    torch.testing.assert_close(gradient * mask.sum(), torch.where(mask, -advantages, 0.0))


@for_any(masks(), seeds)
def test_a_clipped_token_has_no_gradient_and_another_one_has(mask, seed):
    old, new, advantages = (numbers(mask.shape, seed + i) for i in range(3))
    result = policy_loss(new, old, advantages, ALGORITHM)
    stopped = result.clipped_low | result.clipped_high | result.dual_clipped
    gradient = gradient_of(lambda x: policy_loss(x, old, advantages, ALGORITHM).loss, mask, new)
    assert torch.equal(gradient == 0, stopped | ~mask)


@for_any(masks(), seeds)
def test_weights_scale_the_loss_of_their_token_and_nothing_else(mask, seed):
    old, new, advantages, weights = (numbers(mask.shape, seed + i) for i in range(4))
    plain = policy_loss(new, old, advantages, ALGORITHM)
    weighted = policy_loss(new, old, advantages, ALGORITHM, weights.abs())
    assert torch.equal(weighted.loss, plain.loss * weights.abs())
    assert torch.equal(weighted.ratio, plain.ratio)
    assert torch.equal(weighted.dual_clipped, plain.dual_clipped)


every_loss = pytest.mark.parametrize("name", list(PolicyLossName))


@every_loss
@for_any(mask=masks(), seed=seeds)
def test_at_the_old_policy_every_loss_has_the_gradient_of_the_plain_one(name, mask, seed):
    """Of one advantage for a response, as group estimators give it."""
    old, advantages = numbers(mask.shape, seed), numbers((mask.shape[0], 1), seed + 1).expand(mask.shape)
    found = loss_and_gradient(name, old, old, advantages, mask)[1]
    (expected,) = torch.autograd.grad(
        aggregate(-advantages * (new := old.clone().requires_grad_()), mask, BY_SEQUENCE, counts_of(mask)),
        new,
    )
    torch.testing.assert_close(found, expected)


@every_loss
@for_any(mask=masks(), seed=seeds)
def test_a_response_has_the_loss_that_it_has_alone_and_shorter(name, mask, seed):
    """What lies beside it, and where padding ends, follows from the micro-batch."""
    old, new, advantages = (numbers(mask.shape, seed + i) for i in range(3))
    algorithm = AlgorithmConfig(policy_loss=name)
    together = policy_loss(new, old, advantages, algorithm, mask=mask).loss
    for row in range(mask.shape[0]):
        width = max(1, int(torch.where(mask[row], torch.arange(1, mask.shape[1] + 1), 0).max()))
        own = [each[row : row + 1, :width] for each in (new, old, advantages)]
        valid = mask[row : row + 1, :width]
        alone = policy_loss(*own, algorithm, mask=valid).loss
        torch.testing.assert_close(alone[valid], together[row : row + 1, :width][valid])


@for_any(masks(), seeds)
def test_both_forms_of_gspo_learn_the_same_from_one_advantage_for_a_response(mask, seed):
    old, new = (numbers(mask.shape, seed + i) for i in range(2))
    advantages = numbers((mask.shape[0], 1), seed + 2).expand(mask.shape)
    one, other = (
        loss_and_gradient(name, new, old, advantages, mask)
        for name in (PolicyLossName.GSPO, PolicyLossName.GSPO_TOKEN)
    )
    torch.testing.assert_close(one, other)


BY_SEQUENCE = LossAggregation.SEQ_MEAN_TOKEN_MEAN


def loss_and_gradient(name, new, old, advantages, mask):
    new = new.clone().requires_grad_()
    result = policy_loss(new, old, advantages, AlgorithmConfig(policy_loss=name), mask=mask)
    loss = aggregate(result.loss, mask, BY_SEQUENCE, counts_of(mask))
    return loss.detach(), torch.autograd.grad(loss, new)[0]


def counts_of(mask):
    return Counts.of(mask, scale=1)


@for_any(masks(), seeds)
def test_a_token_that_cispo_clips_keeps_its_gradient_and_one_far_away_hardly_moves_sapo(mask, seed):
    old, advantages = numbers(mask.shape, seed), numbers(mask.shape, seed + 1)
    far = old + 3
    kept = loss_and_gradient(PolicyLossName.CISPO, far, old, advantages, mask)[1][mask]
    near, gated = (
        loss_and_gradient(PolicyLossName.SAPO, new, old, advantages, mask)[1][mask] for new in (old, far)
    )
    assert bool((kept != 0).all())
    assert bool((gated.abs() < 1e-4 * near.abs()).all())


def own_loss(log_probs, old_log_probs, advantages, mask):
    return -advantages * (log_probs - old_log_probs).exp()


def not_a_loss(log_probs, old_log_probs, advantages, mask):
    return advantages.mean()


def test_a_loss_of_the_users_own_is_taken_and_one_that_returns_a_number_is_named():
    old, new, advantages = (numbers((2, 3), seed) for seed in range(3))
    algorithm = AlgorithmConfig(policy_loss=f"{__name__}:own_loss")
    torch.testing.assert_close(
        policy_loss(new, old, advantages, algorithm).loss, -advantages * (new - old).exp()
    )
    wrong = AlgorithmConfig(policy_loss=f"{__name__}:not_a_loss")
    with pytest.raises(UserError, match=r"algorithm.policy_loss=.*not_a_loss returned shape \[\].*\[2, 3\]"):
        policy_loss(new, old, advantages, wrong)


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    algorithm = AlgorithmConfig(dual_clip=3.0)
    log_ratio = torch.tensor([[5.0, 5.0, 0.0, -5.0]])
    advantages = torch.tensor([[-1.0, 1.0, -1.0, -1.0]])
    result = policy_loss(log_ratio, torch.zeros(1, 4), advantages, algorithm)
    assert result.loss.tolist() == [[3.0, pytest.approx(-1.2), 1.0, pytest.approx(0.8)]]
    assert result.dual_clipped.tolist() == [[True, False, False, False]]
    assert result.clipped_high.tolist() == [[False, True, False, False]]
    assert result.clipped_low.tolist() == [[False, False, False, True]]


@for_any(st.floats(-1e4, 1e4), st.floats(-100, 100))
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


# KL


@any_kl
@for_any(one=st.floats(-50, 50), other=st.floats(-50, 50))
def test_kl_estimators_are_zero_at_the_reference_and_finite_everywhere(estimator, one, other):
    here, there = torch.tensor([one]), torch.tensor([other])
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


@any_kl
@for_any(seed=seeds)
def test_straight_through_keeps_the_value_and_has_the_gradient_of_the_kl(estimator, seed):
    logits, reference = numbers(8, seed).requires_grad_(), torch.log_softmax(numbers(8, seed + 1), -1)
    policy = torch.log_softmax(logits, -1)
    estimate = kl_loss_per_token(policy, reference, estimator, straight_through=True)
    torch.testing.assert_close(estimate, kl_per_token(policy, reference, estimator))
    # Over all tokens, each as often as the policy writes it.
    (found,) = torch.autograd.grad((policy.exp().detach() * estimate).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    torch.testing.assert_close(found, expected)


@for_any(seed=seeds)
def test_the_gradient_of_k3_is_that_of_the_kl_from_the_reference(seed):
    # so near that nothing is cut off at the limits of k3
    logits = (numbers(8, seed) / 8).requires_grad_()
    reference = torch.log_softmax(numbers(8, seed + 1) / 8, -1)
    policy = torch.log_softmax(logits, -1)
    estimate = kl_loss_per_token(policy, reference, KLEstimator.K3, straight_through=False)
    (found,) = torch.autograd.grad((policy.exp().detach() * estimate).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((reference.exp() * (reference - policy)).sum(), logits)
    torch.testing.assert_close(found, expected)


def test_kl_in_the_loss_as_it_is_by_default_brings_the_policy_to_the_reference():
    """Nothing but the KL term moves this policy of 8 tokens. k1, the default in the reward, would not."""
    in_the_loss = KLConfig(placement=KLPlacement.LOSS)
    logits, reference = numbers(8, 1).requires_grad_(), torch.log_softmax(numbers(8, 2), -1)

    def gradient_of(estimator: KLEstimator) -> torch.Tensor:
        """Over all tokens, each as often as the policy writes it."""
        policy = torch.log_softmax(logits, -1)
        estimate = kl_loss_per_token(policy, reference, estimator, in_the_loss.straight_through)
        return torch.autograd.grad((policy.exp().detach() * estimate).sum(), logits)[0]

    def distance() -> float:
        policy = torch.log_softmax(logits.detach(), -1)
        return float((policy.exp() * (policy - reference)).sum())

    before = distance()
    assert float(gradient_of(KLConfig().per_token).abs().max()) < 1e-6
    for _ in range(200):
        logits = (logits - 0.5 * gradient_of(in_the_loss.per_token)).detach().requires_grad_()
    assert distance() < 0.01 * before


@for_any(st.floats(0, 1), st.floats(-100, 100), st.integers(1, 5000))
def test_the_controller_moves_towards_the_target_and_never_below_zero(coef, kl, responses):
    config = KLConfig(controller=KLController.ADAPTIVE, target=6.0, horizon=10000)
    following = next_kl_coef(coef, kl, responses, config)
    assert following >= 0
    assert (following - coef) * (kl - 6.0) >= 0
    assert abs(following - coef) <= 0.2 * coef * responses / 10000 + 1e-12
    assert next_kl_coef(coef, kl, responses, KLConfig(controller=KLController.FIXED)) == coef


# Distributions


@for_any(seeds, st.floats(0.2, 3))
def test_log_probabilities_and_entropy_are_those_of_the_tempered_distribution(seed, temperature):
    logits = (5 * numbers((6, 11), seed)).requires_grad_()
    tokens = torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(seed))
    positions = torch.tensor([5, 0, 3, 2])
    found = token_outputs(logits, AskedTokens(positions, tokens, temperature, entropy_grad=True))
    exact = torch.distributions.Categorical(logits=logits[positions] / temperature)
    weights = numbers((2, 4), seed + 1)
    for ours, theirs in ((found.log_probs, exact.log_prob(tokens)), (found.entropy, exact.entropy())):
        torch.testing.assert_close(ours, theirs)
    gradients = [
        torch.autograd.grad((weights * torch.stack(pair)).sum(), logits)[0]
        for pair in ((found.log_probs, found.entropy), (exact.log_prob(tokens), exact.entropy()))
    ]
    torch.testing.assert_close(*gradients)


@for_any(seeds)
def test_ids_that_cannot_be_sampled_add_nothing_to_log_probability_entropy_or_gradient(seed):
    logits, seen = numbers((1, 5), seed), []
    for given in (logits, torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)):
        leaf = given.clone().requires_grad_()
        found = token_outputs(leaf, AskedTokens(torch.tensor([0]), torch.tensor([2]), entropy_grad=True))
        (gradient,) = torch.autograd.grad((found.log_probs + found.entropy).sum(), leaf)
        seen.append((found.log_probs, found.entropy, torch.nn.functional.pad(gradient, (0, 6))[:, :6]))
    torch.testing.assert_close(*seen)


@for_any(masks(), seeds)
def test_logits_of_nan_at_a_token_without_loss_get_gradients_of_0(mask, seed):
    valid = mask.flatten()
    logits = torch.where(valid.unsqueeze(1), numbers((len(valid), 5), seed), NAN).requires_grad_()
    found = token_outputs(
        logits, AskedTokens(torch.arange(len(valid)), torch.full((len(valid),), 3), entropy_grad=True)
    )
    loss = torch.where(valid, found.log_probs + found.entropy, 0.0).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert bool(torch.isfinite(gradient[valid]).all())
    assert bool((gradient[~valid] == 0).all())
