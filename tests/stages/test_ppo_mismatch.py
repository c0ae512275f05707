"""Importance weights and mismatch metrics beyond the golden numbers, for any log-probabilities and masks."""

import dataclasses
import math

import pytest
import torch
from hypothesis import strategies as st

from pipeline.config.algorithm import CorrectionConfig, CorrectionLevel, CorrectionMode
from stages.ppo.math.mismatch import effective_share, importance_weights, mismatch_metrics
from tests.support.learning import difference, experience, make_learner, process_group, updated, weights
from tests.support.ppo_batches import NAN, for_any, masks, numbers, seeds

LEVELS = [level for level in CorrectionLevel if level is not CorrectionLevel.NONE]
any_level = pytest.mark.parametrize("level", LEVELS)
any_mode = pytest.mark.parametrize("mode", list(CorrectionMode))
AGREEMENT = {"kl": 0, "k3": 0, "max": 0, "ppl_ratio": 1, "chi2_token": 0, "chi2_sequence": 0} | {
    "effective_samples": 1
}
AGREEMENT = {f"mismatch/{name}": value for name, value in AGREEMENT.items()}


def unbounded(level: CorrectionLevel) -> CorrectionConfig:
    return CorrectionConfig(level=level, high=1e9)


@any_level
@any_mode
@for_any(mask=masks(), seed=seeds, spread=st.floats(0, 30), normalize=st.booleans())
def test_weights_are_finite_and_ignore_what_is_outside_the_mask_even_nan(
    level, mode, mask, seed, spread, normalize
):
    correction = CorrectionConfig(level=level, mode=mode, normalize=normalize)
    log_ratio = numbers(mask.shape, seed) * spread
    found = importance_weights(log_ratio, mask, correction)
    assert bool(torch.isfinite(found).all())
    assert bool((found[~mask] == 0).all())
    assert torch.equal(importance_weights(torch.where(mask, log_ratio, NAN), mask, correction), found)


@any_level
@any_mode
@for_any(mask=masks(), seed=seeds, random=st.randoms())
def test_weights_follow_their_rows(level, mode, mask, seed, random):
    order = list(range(len(mask)))
    random.shuffle(order)
    log_ratio, correction = numbers(mask.shape, seed), CorrectionConfig(level=level, mode=mode)
    found = importance_weights(log_ratio[order], mask[order], correction)
    torch.testing.assert_close(found, importance_weights(log_ratio, mask, correction)[order])


@any_level
@for_any(mask=masks(), seed=seeds, high=st.floats(1, 3), low=st.floats(0.1, 0.9))
def test_a_weight_beyond_the_thresholds_is_lowered_or_becomes_0(level, mask, seed, high, low):
    log_ratio = numbers(mask.shape, seed)
    raw = importance_weights(log_ratio, mask, unbounded(level))
    lowered = importance_weights(log_ratio, mask, CorrectionConfig(level=level, high=high))
    assert torch.equal(lowered, raw.clamp(max=high))
    correction = CorrectionConfig(level=level, mode=CorrectionMode.MASK, high=high, low=low)
    kept = importance_weights(log_ratio, mask, correction)
    assert torch.equal(kept, torch.where((raw >= low) & (raw <= high), raw, 0.0))


@any_level
@for_any(mask=masks(), seed=seeds)
def test_normalised_weights_have_mean_1_over_what_was_weighted(level, mask, seed):
    correction = CorrectionConfig(level=level, normalize=True)
    found = importance_weights(numbers(mask.shape, seed), mask, correction)
    of_units = found[mask] if level is CorrectionLevel.TOKEN else found.amax(dim=1)[mask.any(dim=1)]
    assert float(of_units.mean()) == pytest.approx(1, rel=1e-6)


@for_any(masks(), seeds)
def test_a_responses_weight_is_the_product_of_its_tokens_or_its_geometric_mean(mask, seed):
    log_ratio = numbers(mask.shape, seed)
    token, sequence, geometric = (importance_weights(log_ratio, mask, unbounded(level)) for level in LEVELS)
    for row, kept in enumerate(mask):
        product = float(token[row][kept].prod())
        assert sequence[row][kept].tolist() == pytest.approx([product] * int(kept.sum()))
        mean = product ** (1 / max(1, int(kept.sum())))
        assert geometric[row][kept].tolist() == pytest.approx([mean] * int(kept.sum()))


@any_level
@any_mode
@pytest.mark.parametrize("normalize", [False, True])
def test_engines_that_agree_weigh_1_and_weights_have_no_gradient(level, mode, normalize):
    mask = torch.tensor([[True, False, True], [True, True, False], [False, False, False]])
    correction = CorrectionConfig(level=level, mode=mode, normalize=normalize)
    found = importance_weights(torch.zeros(3, 3, requires_grad=True), mask, correction)
    torch.testing.assert_close(found, mask.float())
    assert not found.requires_grad


@any_level
@any_mode
def test_weights_of_nothing_are_0(level, mode):
    correction = CorrectionConfig(level=level, mode=mode, normalize=True)
    for mask in (torch.zeros(2, 3, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.bool)):
        assert torch.equal(importance_weights(torch.full(mask.shape, NAN), mask, correction), mask.float())
    # So are those of a batch in which all are beyond the thresholds.
    correction = dataclasses.replace(correction, mode=CorrectionMode.MASK)
    one = torch.ones(1, 1, dtype=torch.bool)
    assert float(importance_weights(torch.tensor([[5.0]]), one, correction)) == 0


@for_any(masks(), seeds, st.floats(0, 300))
def test_metrics_are_finite_and_ignore_what_is_outside_the_mask_even_nan(mask, seed, spread):
    rollout, old = (-spread * numbers(mask.shape, seed + i).abs() for i in range(2))
    found = mismatch_metrics(rollout, old, mask)
    assert all(math.isfinite(value) for value in found.values())
    assert 0 < found["mismatch/effective_samples"] <= 1 + 1e-9
    assert found["mismatch/k3"] >= -1e-9
    dirty = [torch.where(mask, x, NAN) for x in (rollout, old)]
    assert mismatch_metrics(*dirty, mask) == found


@for_any(masks(), seeds, st.randoms())
def test_metrics_do_not_depend_on_the_order_of_rows_nor_on_rows_without_tokens(mask, seed, random):
    rollout, old = (numbers(mask.shape, seed + i) for i in range(2))
    order = [*range(len(mask)), -1]
    random.shuffle(order)
    wider = [torch.nn.functional.pad(x, (1, 0, 0, 1))[order] for x in (rollout, old, mask)]
    assert mismatch_metrics(*wider) == pytest.approx(mismatch_metrics(rollout, old, mask), rel=1e-6, abs=1e-9)


@for_any(masks(min_tokens=0), seeds)
def test_engines_that_agree_show_no_mismatch_even_without_tokens(mask, seed):
    log_probs = numbers(mask.shape, seed)
    assert mismatch_metrics(log_probs, log_probs, mask) == pytest.approx(AGREEMENT, abs=1e-6)


def test_the_signs_of_the_mismatch():
    """The engine was surer of its tokens than the trainer: KL(engine || trainer) and the ratio are above."""
    found = mismatch_metrics(torch.full((1, 2), -0.5), torch.full((1, 2), -1.0), torch.ones(1, 2) > 0)
    assert found["mismatch/kl"] == pytest.approx(0.5)
    assert found["mismatch/ppl_ratio"] == pytest.approx(math.exp(0.5))
    assert found["mismatch/chi2_token"] == pytest.approx(math.exp(-1) - 1)
    assert found["mismatch/chi2_sequence"] == pytest.approx(math.exp(-2) - 1)


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_one_weight_that_outweighs_all_others_is_an_effective_sample_of_one(samples):
    token_weights = torch.zeros(1, samples)
    token_weights[0, 0] = 3.0
    assert float(effective_share(token_weights, token_weights >= 0)) == pytest.approx(1 / samples)


@pytest.fixture(scope="module")
def group():
    with process_group():
        yield


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_nan_at_observations_in_what_other_stages_computed_never_reaches_the_weights(
    models, tmp_path, group, estimator
):
    clean = experience(holes=True)
    names = ("rollout_log_probs", "reference_log_probs")
    dirty = {name: torch.where(clean.mask, getattr(clean, name), NAN) for name in names}
    settings = ("algorithm.kl.placement=loss", f"algorithm.kl.estimator={estimator}", "algorithm.kl.coef=1.0")
    learned = []
    for given in (clean, dataclasses.replace(clean, **dirty)):
        learner = make_learner(models, tmp_path / "run", *settings, "algorithm.correction.level=token")
        updated(learner, given, kl_coef=1.0)
        learned.append(weights(learner))
    assert difference(*learned) == 0
