"""Our formulas give verl 0.9.1's numbers (tests/data/ppo_golden.json) to 1e-6."""

import json
from pathlib import Path

import pytest
import torch

from pipeline.algorithmconfig import AlgorithmConfig, KLConfig, KLController, KLEstimator, LossAggregation
from stages.ppo.advantages import gae, grpo, rloo
from stages.ppo.kl import kl_per_token, next_kl_coef
from stages.ppo.losses import Counts, aggregate, policy_loss, value_loss
from stages.ppo.masked import masked_mean, masked_whiten

GOLDEN = json.loads((Path(__file__).parent / "data" / "ppo_golden.json").read_text())
INPUTS = {name: torch.tensor(value) for name, value in GOLDEN["inputs"].items()}
MASKS = {"mask": INPUTS["mask"].bool(), "hole": INPUTS["mask_hole"].bool()}
TIGHT = {"rtol": 0, "atol": 1e-6}


def token_rewards(mask: torch.Tensor) -> torch.Tensor:
    """The score at the last valid token of each row, less 0.05 times the k1 estimate at every token."""
    rewards = -0.05 * kl_per_token(INPUTS["old"], INPUTS["ref"], KLEstimator.K1) * mask
    last = mask.long().cumsum(1).argmax(1)
    rewards[torch.arange(len(last)), last] += INPUTS["score"]
    return rewards


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_kl_estimators(name, estimator):
    kl = kl_per_token(INPUTS["old"], INPUTS["ref"], estimator)
    assert float(masked_mean(kl, MASKS[name])) == pytest.approx(
        GOLDEN[f"kl_{estimator}_{name}_maskedmean"], abs=1e-6
    )


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9)])
def test_gae_with_padding_and_with_an_observation_hole(name, gamma, lam):
    mask = MASKS[name]
    advantages, returns = gae(token_rewards(mask), INPUTS["values"], mask, gamma, lam)
    expected = GOLDEN[f"gae_{name}_g{gamma}_l{lam}"]
    whitened = masked_whiten(advantages, mask)
    torch.testing.assert_close(whitened * mask, torch.tensor(expected["adv"]), **TIGHT)
    torch.testing.assert_close(returns * mask, torch.tensor(expected["ret"]), **TIGHT)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("mode", list(LossAggregation))
def test_policy_and_value_loss(name, mode):
    mask = MASKS[name]
    advantages, returns = gae(token_rewards(mask), INPUTS["values"], mask, 1.0, 0.95)
    advantages = masked_whiten(advantages, mask)
    counts = Counts.of(mask, scale=mask.shape[1])
    result = policy_loss(INPUTS["new"], INPUTS["old"], advantages, AlgorithmConfig())
    clipped = masked_mean((result.clipped_low | result.clipped_high).float(), mask)
    ours = [
        aggregate(result.loss, mask, mode, counts),
        clipped,
        masked_mean(INPUTS["old"] - INPUTS["new"], mask),
        masked_mean(result.dual_clipped.float(), mask),
    ]
    expected = GOLDEN[f"pg_{name}_{mode}"]
    # With the hole the golden page does not say which advantages its policy loss was given: the loss is
    # compared without the hole only, the clip fractions and the KL with it too.
    first = 0 if name == "mask" else 1
    assert [float(x) for x in ours[first:]] == pytest.approx(expected[first:], abs=1e-6)
    # The golden value predictions are the old values plus 0.4.
    loss, is_clipped = value_loss(INPUTS["values"] + 0.4, returns, INPUTS["values"], 0.2)
    ours = [aggregate(loss, mask, mode, counts), masked_mean(is_clipped.float(), mask)]
    assert [float(x) for x in ours] == pytest.approx(GOLDEN[f"vf_{name}_{mode}"], rel=1e-6, abs=1e-6)


def test_group_estimators():
    groups, mask = torch.tensor([0, 0, 1, 1]), MASKS["mask"]
    torch.testing.assert_close(
        grpo(INPUTS["score"], groups, mask, True), torch.tensor(GOLDEN["grpo"]), **TIGHT
    )
    torch.testing.assert_close(rloo(INPUTS["score"], groups, mask), torch.tensor(GOLDEN["rloo"]), **TIGHT)


def test_adaptive_kl_controller():
    config, coef, seen = KLConfig(controller=KLController.ADAPTIVE), 0.2, []
    for kl in (3, 6, 12, 6.6):
        coef = next_kl_coef(coef, kl, 256, config)
        seen.append(coef)
    assert seen == pytest.approx(GOLDEN["adaptive_kl"], abs=1e-9)
