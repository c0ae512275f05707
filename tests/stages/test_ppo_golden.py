"""Our formulas give the numbers of verl 0.9.1 and TRL 1.12: to 1e-6 in float64, to 1e-5 in float32.

Three files in tests/golden: ppo_golden.json, ppo_golden_more.json for what that one lacks, and
ppo_golden_steps.json for rewards of steps, lambdas, teachers and warm-up. Their inputs and how they were
made: tests/golden/make_ppo_golden.py and make_ppo_golden_steps.py.
"""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pipeline.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    CorrectionLevel,
    CorrectionMode,
    DistillationConfig,
    Estimator,
    KLConfig,
    KLController,
    KLEstimator,
    LossAggregation,
    PolicyLossName,
)
from stages.ppo.distillation import teacher_loss
from stages.ppo.logits import AskedTokens, TokenOutputs, token_outputs
from stages.ppo.math.advantages import (
    gae,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from stages.ppo.math.kl import kl_loss_per_token, kl_per_token, next_kl_coef
from stages.ppo.math.losses import Counts, aggregate, policy_loss, value_loss
from stages.ppo.math.masked import masked_mean, masked_var, masked_whiten
from stages.ppo.math.mismatch import importance_weights, mismatch_metrics
from stages.ppo.math.shaping import RunningMoments, overlong_penalty
from stages.ppo.targets import TargetScores, estimate, teacher_advantages, token_rewards
from tests.support import ROOT

FOLDER = ROOT / "tests/golden"
PAGE = json.loads((FOLDER / "ppo_golden.json").read_text())
MORE = json.loads((FOLDER / "ppo_golden_more.json").read_text())
STEPS = json.loads((FOLDER / "ppo_golden_steps.json").read_text())
MASKS = ("mask", "hole", "empty")
MODES = list(LossAggregation)


@dataclass(frozen=True)
class Precision:
    dtype: torch.dtype
    tolerance: float
    """Absolute."""

    def check(self, found: object, expected: object) -> None:
        ours = torch.as_tensor(found, dtype=torch.float64)
        theirs = torch.tensor(expected, dtype=torch.float64)
        assert ours.shape == theirs.shape
        assert float((ours - theirs).abs().max()) <= self.tolerance


@pytest.fixture(params=[(torch.float64, 1e-6), (torch.float32, 1e-5)], ids=["float64", "float32"])
def precision(request) -> Precision:
    return Precision(*request.param)


@pytest.fixture
def page(precision) -> SimpleNamespace:
    return SimpleNamespace(**{k: torch.tensor(v, dtype=precision.dtype) for k, v in PAGE["inputs"].items()})


@pytest.fixture
def more(precision) -> SimpleNamespace:
    given = [(key.partition("/"), value) for key, value in (MORE | STEPS).items()]
    inputs = {name: value for (kind, _, name), value in given if kind == "inputs"}
    return SimpleNamespace(**{k: torch.tensor(v, dtype=precision.dtype) for k, v in inputs.items()})


def mask_of(inputs: SimpleNamespace, name: str) -> Tensor:
    return getattr(inputs, name).bool()


def page_mask(page: SimpleNamespace, name: str) -> Tensor:
    return (page.mask if name == "mask" else page.mask_hole).bool()


def last_rewards(inputs: SimpleNamespace, mask: Tensor) -> Tensor:
    """The score at the last valid token of each row, less 0.05 times the k1 estimate at every token."""
    rewards = torch.where(mask, -0.05 * kl_per_token(inputs.old, inputs.ref, KLEstimator.K1), 0.0)
    last = mask.long().cumsum(1).argmax(1)
    rewards[torch.arange(len(last)), last] += inputs.score
    return rewards


# ppo_golden.json


@pytest.mark.parametrize("name", ["mask", "hole"])
@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_mean_kl(precision, page, name, estimator):
    kl = masked_mean(kl_per_token(page.old, page.ref, estimator), page_mask(page, name))
    precision.check(kl, PAGE[f"kl_{estimator}_{name}_maskedmean"])


@pytest.mark.parametrize("name", ["mask", "hole"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9)])
def test_gae_with_padding_and_with_an_observation_hole(precision, page, name, gamma, lam):
    mask = page_mask(page, name)
    advantages, returns = gae(last_rewards(page, mask), page.values, mask, gamma, lam)
    expected = PAGE[f"gae_{name}_g{gamma}_l{lam}"]
    whitened = masked_whiten(advantages, mask)
    precision.check(whitened, expected["adv_unmasked"])
    precision.check(whitened * mask, expected["adv"])
    precision.check(returns * mask, expected["ret"])


@pytest.mark.parametrize("name", ["mask", "hole"])
@pytest.mark.parametrize("mode", MODES)
def test_policy_and_value_loss(precision, page, name, mode):
    mask = page_mask(page, name)
    advantages, returns = gae(last_rewards(page, mask), page.values, mask, 1.0, 0.95)
    counts = Counts.of(mask, scale=mask.shape[1])
    clips = AlgorithmConfig(clip_range_low=0.2, clip_range_high=0.28)
    result = policy_loss(page.new, page.old, masked_whiten(advantages, mask), clips)
    ours = [
        aggregate(result.loss, mask, mode, counts),
        masked_mean((result.clipped_low | result.clipped_high).double(), mask),
        masked_mean(page.old - page.new, mask),
        masked_mean(result.dual_clipped.double(), mask),
    ]
    precision.check(ours, PAGE[f"pg_{name}_{mode}"])
    loss, is_clipped = value_loss(page.values + 0.4, returns, page.values, 0.2)
    ours = [aggregate(loss, mask, mode, counts), masked_mean(is_clipped.double(), mask)]
    precision.check(ours, PAGE[f"vf_{name}_{mode}"])


def test_group_advantages(precision, page):
    groups, mask = torch.tensor([0, 0, 1, 1]), page_mask(page, "mask")
    precision.check(grpo(page.score, groups, mask, True), PAGE["grpo"])
    precision.check(rloo(page.score, groups, mask), PAGE["rloo"])


def test_adaptive_kl_controller():
    config, coef, seen = KLConfig(controller=KLController.ADAPTIVE), 0.2, []
    for kl in (3, 6, 12, 6.6):
        coef = next_kl_coef(coef, kl, 256, config)
        seen.append(coef)
    assert seen == pytest.approx(PAGE["adaptive_kl"], abs=1e-9)


# ppo_golden_more.json


@pytest.mark.parametrize("name", ["mask", "hole"])
def test_advantages_of_every_estimator(precision, more, name):
    mask, groups, seen = mask_of(more, name), more.groups.long(), {}
    rewards = last_rewards(more, mask)
    totals = rewards.sum(dim=1)
    for gamma, lam in ((1.0, 0.95), (0.97, 0.8)):
        advantages, returns = gae(rewards, more.values, mask, gamma, lam)
        seen[f"gae_g{gamma}_l{lam}_advantages"] = masked_whiten(advantages, mask) * mask
        seen[f"gae_g{gamma}_l{lam}_returns"] = returns * mask
    for gamma in (1.0, 0.9):
        advantages, returns = reinforce_plus_plus(rewards, mask, gamma)
        seen[f"reinforce++_g{gamma}_advantages"] = advantages
        seen[f"reinforce++_g{gamma}_returns"] = returns
    seen["rewards"] = rewards
    seen["remax"] = remax(rewards, more.baseline, mask, 1.0)  # verl's has no discount
    seen["grpo"] = grpo(totals, groups, mask, True)
    seen["dr-grpo"] = grpo(totals, groups, mask, False)
    seen["rloo"] = rloo(totals, groups, mask)
    seen["reinforce++-baseline"] = reinforce_plus_plus_baseline(totals, groups, mask)
    for key, found in seen.items():
        precision.check(found, MORE[f"{name}/{key}"])


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_kl_and_its_gradient_up_to_the_limits_of_the_exponent(precision, more, estimator, straight_through):
    precision.check(kl_per_token(more.old, more.ref, estimator), MORE[f"kl_{estimator}"])
    log_probs = (more.differences - 31).requires_grad_()
    reference = torch.full_like(more.differences, -31.0)
    kl = kl_loss_per_token(log_probs, reference, estimator, straight_through)
    (gradient,) = torch.autograd.grad(kl.sum(), log_probs)
    kind = f"kl_{estimator}{'+' if straight_through else ''}"
    precision.check(kl.detach(), MORE[f"{kind}_differences"])
    precision.check(gradient, MORE[f"{kind}_gradient"])


@pytest.mark.parametrize("controller", list(KLController))
def test_kl_controllers(controller):
    config, coef, seen = KLConfig(controller=controller, target=6.0, horizon=10000), 0.1, []
    for kl, count in MORE["kl_steps"]:
        coef = next_kl_coef(coef, kl, count, config)
        seen.append(coef)
    assert seen == pytest.approx(MORE[f"{controller}_kl"], abs=1e-9)


def test_log_probabilities_and_entropy_with_its_gradient(precision, more):
    logits, tokens = more.logits.requires_grad_(), more.tokens.long().flatten()
    found = token_outputs(
        logits.flatten(0, 1), AskedTokens(torch.arange(len(tokens)), tokens, entropy_grad=True)
    )
    (gradient,) = torch.autograd.grad(found.entropy.sum(), logits)
    precision.check(found.entropy.view(2, 3).detach(), MORE["entropy"])
    precision.check(gradient, MORE["entropy_gradient"])
    precision.check(found.log_probs.view(2, 3).detach(), MORE["log_probs"])


CLIPS = {
    "symmetric": AlgorithmConfig(clip_range_low=0.2, clip_range_high=0.2),
    "asymmetric": AlgorithmConfig(clip_range_low=0.15, clip_range_high=0.28),
    "dual": AlgorithmConfig(clip_range_low=0.2, clip_range_high=0.2, dual_clip=1.3),
}


def check_policy_loss(precision, more, mask, kind, mode, counts, expected, weights=None, old=None):
    new = more.new.clone().requires_grad_()
    result = policy_loss(new, more.old if old is None else old, more.advantages, CLIPS[kind], weights)
    loss = aggregate(result.loss, mask, mode, counts)
    (gradient,) = torch.autograd.grad(loss, new)
    precision.check(loss.detach(), expected["loss"])
    precision.check(gradient, expected["gradient"])
    clipped = (result.clipped_low | result.clipped_high).double()
    precision.check(masked_mean(clipped, mask), expected["clipped"])
    precision.check(masked_mean(result.dual_clipped.double(), mask), expected["dual_clipped"])


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("mode", MODES)
def test_policy_loss_and_gradient(precision, more, name, mode):
    mask = mask_of(more, name)
    counts = Counts.of(mask, scale=mask.shape[1])
    for kind in CLIPS:
        expected = MORE[f"{name}/policy_{kind}_{mode}"]
        check_policy_loss(precision, more, mask, kind, mode, counts, expected)
    correction = CorrectionConfig(level=CorrectionLevel.TOKEN)
    weights = importance_weights(more.old - more.rollout, mask, correction)
    expected = MORE[f"{name}/policy_weighted_{mode}"]
    check_policy_loss(precision, more, mask, "asymmetric", mode, counts, expected, weights)
    # algorithm.old_log_probs=rollout, verl's bypass_mode
    expected = MORE[f"{name}/policy_bypass_{mode}"]
    check_policy_loss(precision, more, mask, "asymmetric", mode, counts, expected, old=more.rollout)
    # A micro-batch of a mini-batch of 100 tokens in 12 sequences.
    counts = replace(counts, tokens=100, sequences=12, scale=16)
    expected = MORE[f"{name}/policy_global-counts_{mode}"]
    check_policy_loss(precision, more, mask, "asymmetric", mode, counts, expected)


NAMED = {
    "gspo": (PolicyLossName.GSPO_TOKEN, LossAggregation.SEQ_MEAN_TOKEN_MEAN),
    "sapo": (PolicyLossName.SAPO, LossAggregation.SEQ_MEAN_TOKEN_MEAN),
    "cispo": (PolicyLossName.CISPO, LossAggregation.TOKEN_MEAN),
    "gmpo": (PolicyLossName.GMPO, LossAggregation.SEQ_MEAN_TOKEN_MEAN),
}
"""Our loss and aggregation by verl's; its gspo is the form for tokens."""


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("theirs", NAMED)
@pytest.mark.parametrize("weighting", ["", "_weighted"])
def test_policy_losses_by_name(precision, more, name, theirs, weighting):
    if (entry := MORE.get(f"{name}/policy_{theirs}{weighting}")) is None:
        assert theirs == "gmpo"  # verl's takes the mean over empty rows too, and weights of whole responses
        return
    mask, (loss_name, mode) = mask_of(more, name), NAMED[theirs]
    weights = None
    if weighting:
        correction = CorrectionConfig(level=CorrectionLevel.TOKEN)
        weights = importance_weights(more.old - more.rollout, mask, correction)
    new = more.new.clone().requires_grad_()
    algorithm = replace(CLIPS["asymmetric"], policy_loss=loss_name)
    result = policy_loss(new, more.old, more.advantages, algorithm, weights, mask)
    loss = aggregate(result.loss, mask, mode, Counts.of(mask, scale=mask.shape[1]))
    precision.check(loss.detach(), entry["loss"])
    precision.check(torch.autograd.grad(loss, new)[0], entry["gradient"])
    if theirs in ("gspo", "cispo"):  # verl counts others' otherwise, or not at all
        clipped = (result.clipped_low | result.clipped_high).double()
        precision.check(masked_mean(clipped, mask), entry["clipped"])


@pytest.mark.parametrize("kind", CLIPS)
def test_the_golden_ratios_reach_every_bound(kind):
    entry = MORE[f"mask/policy_{kind}_token-mean"]
    assert 0 < entry["dual_clipped"] < entry["clipped"] < 1


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("mode", MODES)
def test_value_loss_and_gradient_and_aggregation(precision, more, name, mode):
    mask = mask_of(more, name)
    counts = Counts.of(mask, scale=mask.shape[1])
    predictions = more.value_predictions.clone().requires_grad_()
    per_token, is_clipped = value_loss(predictions, more.returns, more.values, 0.2)
    loss = aggregate(per_token, mask, mode, counts)
    (gradient,) = torch.autograd.grad(loss, predictions)
    clipped = masked_mean(is_clipped.double(), mask)
    precision.check([loss.detach(), clipped], MORE[f"{name}/value_{mode}"])
    precision.check(gradient, MORE[f"{name}/value_{mode}_gradient"])
    precision.check(aggregate(more.returns, mask, mode, counts), MORE[f"{name}/aggregate_{mode}"])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", [CorrectionMode.TRUNCATE, CorrectionMode.MASK])
@pytest.mark.parametrize("level", [CorrectionLevel.TOKEN, CorrectionLevel.SEQUENCE])
@pytest.mark.parametrize("name", MASKS)
def test_importance_weights(precision, more, name, level, mode, normalize):
    correction = CorrectionConfig(level=level, mode=mode, high=2.0, low=0.5, normalize=normalize)
    weights = importance_weights(more.log_ratio, mask_of(more, name), correction)
    precision.check(weights, MORE[f"{name}/weights_{level}_{mode}{'_normalized' if normalize else ''}"])


@pytest.mark.parametrize("name", MASKS)
def test_geometric_importance_weights(precision, more, name):
    mask = mask_of(more, name)
    correction = CorrectionConfig(level=CorrectionLevel.GEOMETRIC, high=1e3)
    weights = importance_weights(more.log_ratio, mask, correction)
    precision.check(1 / weights.amax(dim=1)[mask.any(dim=1)], MORE[f"{name}/geometric_inverse"])
    correction = replace(correction, mode=CorrectionMode.MASK, low=0.8, high=1.25)
    kept = importance_weights(more.log_ratio, mask, correction) > 0
    precision.check(kept, MORE[f"{name}/geometric_kept"])


@pytest.mark.parametrize("name", MASKS)
def test_mismatch_metrics(precision, more, name):
    found = mismatch_metrics(more.rollout, more.old, mask_of(more, name))
    expected = MORE[f"{name}/metrics"]
    names = {"kl": "kl", "k3": "k3_kl", "chi2_token": "chi2_token"}
    if name != "empty":  # verl takes a row without tokens for a response that agrees
        names |= {"ppl_ratio": "ppl_ratio", "chi2_sequence": "chi2_seq"}
    for ours, theirs in names.items():
        precision.check(found[f"mismatch/{ours}"], expected[theirs])
    precision.check(found["mismatch/effective_samples"], MORE[f"{name}/effective_sample_size"])


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_whitening_is_verls_and_trls(precision, more, name, shift_mean):
    mask, values = mask_of(more, name), more.returns * 3 + 1
    precision.check(masked_var(values, mask), MORE[f"{name}/masked_var"])
    whitened = masked_whiten(values, mask, shift_mean) * mask
    for project in ("verl", "trl"):
        precision.check(whitened, MORE[f"{name}/{project}_whiten{'' if shift_mean else '_unshifted'}"])


def test_soft_overlong_penalty(precision, more):
    precision.check(-overlong_penalty(more.lengths, 16, 6, 0.7), MORE["overlong"])


def test_running_moments(precision, more):
    moments, seen = RunningMoments(), []
    for scores in more.score.split([2, 1, 3]):
        moments = moments.including(scores)
        seen.append([moments.mean, moments.std])
    precision.check(seen, MORE["running_moments"])


# ppo_golden_steps.json


def estimated(more: SimpleNamespace, mask: Tensor, samples: int = 3, **settings: object):
    """Rewards, advantages and returns of an update with these settings, whose rules reward steps."""
    steps = torch.where(more.step_ends.bool() & mask, more.step_rewards, torch.nan)
    scores = steps.nan_to_num().sum(dim=1)
    given = SimpleNamespace(
        mask=mask,
        groups=more.groups.long(),
        rollout_log_probs=more.old,
        reference_log_probs=more.ref,
        step_rewards=steps,
        outcome=SimpleNamespace(scores=scores),
    )
    algorithm = AlgorithmConfig(gamma=0.97, lam=0.8, **settings)
    config = SimpleNamespace(algorithm=algorithm, rollout=SimpleNamespace(samples_per_prompt=samples))
    rewards = token_rewards(config, given, scores, more.old, 0.05)
    return rewards, *estimate(config, given, rewards, TargetScores(scores, more.baseline), more.values)


@pytest.mark.parametrize("name", ["mask", "hole"])
def test_rewards_of_steps_through_gae_and_its_lambdas(precision, more, name):
    """Decoupled: the advantages of one lambda, and the returns of another."""
    mask = mask_of(more, name)
    for settings, of_advantages, of_returns in (
        ({}, "gae", "gae"),
        ({"critic_lam": 1.0}, "gae", "critic"),
        ({"lam_alpha": 0.6}, "alpha", "alpha"),
        ({"lam_alpha": 0.6, "critic_lam": 1.0}, "alpha", "critic"),
    ):
        rewards, advantages, returns = estimated(more, mask, **settings)
        precision.check(rewards, STEPS[f"{name}/rewards"])
        precision.check(advantages * mask, STEPS[f"{name}/{of_advantages}_advantages"])
        precision.check(returns * mask, STEPS[f"{name}/{of_returns}_returns"])


@pytest.mark.parametrize("name", ["mask", "hole"])
@pytest.mark.parametrize(
    ("theirs", "estimator", "settings"),
    [
        ("reinforce++", Estimator.REINFORCE_PLUS_PLUS, {}),
        ("grpo", Estimator.GRPO, {}),
        ("dr-grpo", Estimator.GRPO, {"normalize_group_std": False}),
        ("reinforce++-baseline", Estimator.REINFORCE_PLUS_PLUS_BASELINE, {}),
    ],
)
def test_rewards_of_steps_through_estimators_without_a_critic(
    precision, more, name, theirs, estimator, settings
):
    found = estimated(more, mask_of(more, name), estimator=estimator, **settings)[1]
    precision.check(found, STEPS[f"{name}/{theirs}"])


@pytest.mark.parametrize("name", ["mask", "hole"])
def test_rewards_of_steps_through_remax(precision, more, name):
    rewards, *_ = estimated(more, mask_of(more, name))
    precision.check(remax(rewards, more.baseline, mask_of(more, name), 1.0), STEPS[f"{name}/remax"])


COEF = 0.7
"""Weight of the teacher beside rewards; alone it is 1."""


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("mode", [LossAggregation.TOKEN_MEAN, LossAggregation.SEQ_MEAN_TOKEN_MEAN])
@pytest.mark.parametrize("with_rewards", [False, True])
def test_a_teacher_in_the_advantage_and_in_the_loss(precision, more, name, mode, with_rewards):
    mask, weight = mask_of(more, name), COEF if with_rewards else 1.0
    plain = more.advantages if with_rewards else torch.zeros_like(more.advantages)
    suffix = f"{'_with-rewards' if with_rewards else ''}_{mode}"
    given = SimpleNamespace(
        mask=mask,
        teacher_log_probs=more.teacher,
        teacher_weights=torch.full((len(mask), 1), weight),
        teacher_top_log_probs=None,
    )
    advantages = plain + teacher_advantages(given, more.old)
    check_taught(
        precision, more.old, more.old, advantages, mask, mode, STEPS[f"{name}/teacher_advantage{suffix}"]
    )
    for estimator in (KLEstimator.ABS, KLEstimator.K2, KLEstimator.K3):
        settings = DistillationConfig(estimator=estimator)
        expected = STEPS[f"{name}/teacher_loss_{estimator}{suffix}"]
        check_taught(precision, more.new, more.old, plain, mask, mode, expected, (settings, given))


def check_taught(precision, new, old, advantages, mask, mode, expected, teacher=None) -> None:
    new = new.clone().requires_grad_()
    per_token = policy_loss(new, old, advantages, CLIPS["symmetric"]).loss
    if teacher is not None:
        whole = SimpleNamespace(rows=torch.arange(len(mask)), num_response_columns=mask.shape[1])
        per_token = per_token + teacher_loss(*teacher, whole, TokenOutputs(new, None))
    loss = aggregate(per_token, mask, mode, Counts.of(mask, scale=mask.shape[1]))
    precision.check(loss.detach(), expected["loss"])
    precision.check(torch.autograd.grad(loss, new)[0], expected["gradient"])


@pytest.mark.parametrize("theirs", range(5))
def test_a_warmup_of_verl_has_one_iteration_fewer(theirs):
    algorithm = AlgorithmConfig(critic_warmup=max(0, theirs - 1))
    assert [algorithm.trains_policy(k) for k in range(1, 7)] == STEPS[f"critic_warmup_{theirs}"]
