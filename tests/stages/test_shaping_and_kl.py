"""What the update makes of rewards, of the reference and of the engine's log-probabilities."""

import dataclasses

import pytest
import torch

from pipeline.config.algorithm import KLEstimator
from stages.ppo.experience import Experience
from stages.ppo.targets import token_rewards
from tests.support.learning import difference, experience, metrics_of, updated, weights

GROUPS = ("algorithm=grpo", "rollout.samples_per_prompt=4", "data.prompts_per_iteration=2")


def as_the_trainer_computes(make, given: Experience) -> Experience:
    """With the engine's log-probabilities as exact as they can be."""
    old = updated(make(), given).targets.old_log_probs
    return dataclasses.replace(given, rollout_log_probs=torch.where(given.mask, old, 0.0))


def test_shaping_normalises_then_limits_then_punishes(make):
    given = experience(rewards=[float(i) for i in range(8)])
    shaping = ("normalize=true", "clip=1.0", "missing_eos_penalty=0.5", "overlong_buffer=10")
    learner = make(*(f"algorithm.shaping.{setting}" for setting in shaping))
    shaped = updated(learner, given).scores.shaped
    normal = ((torch.arange(8) - 3.5) / 6**0.5).clamp(-1, 1)
    missing = torch.tensor([0, 0, 0, 0.5] * 2)
    overlong = (given.outcome.lengths - 2).clamp(0, 10) / 10  # max_new_tokens is 12
    torch.testing.assert_close(shaped, normal - missing - overlong)
    assert metrics_of(learner, given)["reward/mean"] == 3.5, "the reward that is reported is the user's"


def test_groups_of_equal_rewards_are_left_out_and_counted(make):
    given = experience(samples=4, rewards=[0.3] * 4 + [0.1, 0.9, 0.2, 0.4])
    learner = make(*GROUPS, "algorithm.shaping.filter_groups=true")
    metrics = metrics_of(learner, given)
    assert metrics["reward/discarded"] == 4
    assert metrics["policy/steps"] == 4
    other = make(*GROUPS)
    updated(other, given.select([4, 5, 6, 7]))
    assert difference(weights(learner), weights(other)) == 0


def test_responses_that_were_cut_are_left_out_of_the_update_and_of_their_groups(make):
    """The last of each prompt's four, whose rewards are far from those of the others."""
    rewards = [0.2, 0.1, 0.9, 9.0, 0.1, 0.3, 0.7, -5.0]
    given = experience(samples=4, rewards=rewards, mask_truncated=True)
    everything = experience(samples=4, rewards=rewards)
    reasons = everything.rewarded.responses["finish_reason"].to_pylist()
    whole = [row for row, reason in enumerate(reasons) if reason != "length"]
    assert 0 < len(whole) < len(reasons)
    learner, other = make(*GROUPS), make(*GROUPS)
    metrics = metrics_of(learner, given)
    updated(other, everything.select(whole))
    assert metrics["reward/discarded"] == len(reasons) - len(whole)
    assert metrics["response_length/clip_ratio"] == 1 - len(whole) / len(reasons)
    assert metrics["reward/max"] == 9.0, "the reward that is reported is that of all"
    assert difference(weights(learner), weights(other)) == 0


def test_an_iteration_without_anything_to_teach_leaves_the_policy_as_it_is(make):
    learner = make(*GROUPS, "algorithm.shaping.filter_groups=true")
    before = weights(learner)
    metrics = metrics_of(learner, experience(samples=4, rewards=[0.7] * 8))
    assert metrics["reward/discarded"] == 8
    assert metrics["policy/steps"] == 0
    assert "policy/loss" not in metrics
    assert difference(before, weights(learner)) == 0


def test_fewer_responses_than_mini_batches_make_fewer_steps(make):
    learner = make(*GROUPS, "update.minibatches=8", "algorithm.shaping.filter_groups=true")
    metrics = metrics_of(learner, experience(samples=4, rewards=[0.3] * 4 + [0.1, 0.9, 0.2, 0.4]))
    assert metrics["policy/steps"] == 2 * 4
    assert metrics["policy/ratio_error_first"] == 0


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_kl_in_the_loss_pulls_towards_the_reference_and_leaves_the_reward_alone(make, estimator):
    """With equal rewards GRPO has nothing to say, so all that moves the policy is the KL."""
    given = experience(samples=4, rewards=[0.7] * 8)
    learner = make(
        *GROUPS,
        "algorithm.kl.placement=loss",
        f"algorithm.kl.estimator={estimator}",
        "algorithm.kl.straight_through=true",
        "update.epochs=8",
    )
    done = updated(learner, given, kl_coef=1.0)
    assert float(done.targets.advantages.abs().max()) == 0
    first, last = done.steps.sums[0]["kl_loss"], done.steps.sums[-1]["kl_loss"]
    again = updated(learner, given, kl_coef=1.0).targets.old_log_probs
    gap = (again - given.reference_log_probs)[given.mask].abs().mean()
    before = (done.targets.old_log_probs - given.reference_log_probs)[given.mask].abs().mean()
    assert gap < before
    assert estimator is KLEstimator.K1 or last < first


def test_exact_engines_need_no_correction(make):
    given = as_the_trainer_computes(make, experience())
    plain, corrected = make(), make("algorithm.correction.level=token")
    metrics = metrics_of(plain, given)
    assert metrics["mismatch/kl"] == metrics["mismatch/k3"] == metrics["mismatch/max"] == 0
    assert metrics["mismatch/effective_samples"] == pytest.approx(1)
    assert metrics["mismatch/ppl_ratio"] == pytest.approx(1)
    updated(corrected, given)
    assert difference(weights(plain), weights(corrected)) == 0


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_an_engine_that_is_off_is_measured_and_corrected(make, level, mode):
    exact = as_the_trainer_computes(make, experience(holes=True))
    noise = torch.randn(exact.mask.shape, generator=torch.Generator().manual_seed(5)) * 0.4
    given = dataclasses.replace(exact, rollout_log_probs=exact.rollout_log_probs + noise)
    learner = make(
        f"algorithm.correction.level={level}",
        f"algorithm.correction.mode={mode}",
        "algorithm.correction.high=1.2",
        "algorithm.correction.low=0.9",
    )
    metrics = metrics_of(learner, given)
    assert metrics["mismatch/k3"] > 0.01
    assert metrics["mismatch/effective_samples"] < 1
    assert metrics["correction/weight_max"] < 1.2 + 1e-6
    assert (metrics["correction/masked_share"] > 0) is (mode == "mask")
    uncorrected = make()
    updated(uncorrected, given)
    assert difference(weights(learner), weights(uncorrected)) > 1e-6


def test_whitened_rewards_are_what_returns_add_up(make):
    """With a critic that knows nothing yet, and nothing discounted."""
    given = experience(holes=True)
    learner = make("algorithm.whiten_rewards=true", "algorithm.lam=1.0")
    targets = updated(learner, given).targets
    rewards = token_rewards(learner.config, given, given.outcome.scores, targets.old_log_probs, 0.05)
    mean, std = rewards[given.mask].mean(), rewards[given.mask].std()
    whitened = torch.where(given.mask, (rewards - mean) / std + mean, 0.0)
    torch.testing.assert_close(targets.returns[:, 0], whitened.sum(dim=1))
