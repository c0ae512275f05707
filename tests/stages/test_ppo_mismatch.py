"""Importance weights and mismatch metrics beyond the golden numbers, for any log-probabilities and masks."""

import dataclasses
import math

import pytest
import torch
from hypothesis import strategies as st

from pipeline.config.algorithm import CorrectionConfig, CorrectionLevel, CorrectionMode
from stages.ppo.math.mismatch import (
    effective_share,
    importance_weights,
    mismatch_metrics,
    pushed_outwards,
    second_moment,
)
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


def signs(mask: torch.Tensor, seed: int) -> torch.Tensor:
    """Advantages, some of them 0."""
    return numbers(mask.shape, seed + 1).round(decimals=0)


@any_level
@any_mode
@for_any(mask=masks(), seed=seeds, spread=st.floats(0, 30), normalize=st.booleans())
def test_weights_are_finite_and_ignore_what_is_outside_the_mask_even_nan(
    level, mode, mask, seed, spread, normalize
):
    correction = CorrectionConfig(level=level, mode=mode, normalize=normalize)
    log_ratio = numbers(mask.shape, seed) * spread
    advantages = signs(mask, seed)
    found = importance_weights(log_ratio, mask, correction, advantages)
    assert bool(torch.isfinite(found).all())
    assert bool((found[~mask] == 0).all())
    dirty = (torch.where(mask, x, NAN) for x in (log_ratio, advantages))
    assert torch.equal(importance_weights(next(dirty), mask, correction, next(dirty)), found)


@any_level
@any_mode
@for_any(mask=masks(), seed=seeds, random=st.randoms())
def test_weights_follow_their_rows(level, mode, mask, seed, random):
    order = list(range(len(mask)))
    random.shuffle(order)
    log_ratio, advantages = numbers(mask.shape, seed).round(decimals=1), signs(mask, seed)
    correction = CorrectionConfig(level=level, mode=mode)
    found = importance_weights(log_ratio[order], mask[order], correction, advantages[order])
    torch.testing.assert_close(found, importance_weights(log_ratio, mask, correction, advantages)[order])


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
    found = importance_weights(torch.zeros(3, 3, requires_grad=True), mask, correction, torch.ones(3, 3))
    torch.testing.assert_close(found, mask.float())
    assert not found.requires_grad


@any_level
@any_mode
def test_weights_of_nothing_are_0(level, mode):
    correction = CorrectionConfig(level=level, mode=mode, normalize=True)
    for mask in (torch.zeros(2, 3, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.bool)):
        unknown = torch.full(mask.shape, NAN)
        assert torch.equal(importance_weights(unknown, mask, correction, unknown), mask.float())
    # So are those of a batch in which all are beyond the thresholds.
    correction = dataclasses.replace(correction, mode=CorrectionMode.MASK)
    one = torch.ones(1, 1, dtype=torch.bool)
    assert float(importance_weights(torch.tensor([[5.0]]), one, correction)) == 0


def left_out_one_by_one(log_ratio, advantages, mask, bound) -> torch.Tensor:
    """What M2PO's paper says, a token at a time (arXiv 2510.01161, algorithm 1)."""
    places = [(row, column) for row, column in mask.nonzero().tolist()]
    tokens = {
        place: float(log_ratio[place]) ** 2
        for place in places
        if (advantages[place] > 0 and log_ratio[place] > 0)
        or (advantages[place] < 0 and log_ratio[place] < 0)
    }
    left_out = torch.zeros_like(mask)
    while tokens and sum(tokens.values()) / len(tokens) > bound:
        furthest = max(tokens, key=tokens.__getitem__)
        del tokens[furthest]
        left_out[furthest] = True
    return left_out


M2PO = CorrectionConfig(level=CorrectionLevel.TOKEN, mode=CorrectionMode.M2PO, high=1e9)


@for_any(masks(), seeds, st.floats(0, 3), st.floats(0.001, 2))
def test_m2po_leaves_out_what_its_paper_does_and_weighs_the_others_by_their_ratio(mask, seed, spread, bound):
    log_ratio, advantages = spread * numbers(mask.shape, seed), signs(mask, seed)
    correction = dataclasses.replace(M2PO, second_moment=bound)
    found = importance_weights(log_ratio, mask, correction, advantages)
    left_out = left_out_one_by_one(log_ratio, advantages, mask, bound)
    expected = torch.where(mask & ~left_out, log_ratio.exp(), 0.0)
    torch.testing.assert_close(found, expected)
    kept = pushed_outwards(log_ratio, advantages, mask & ~left_out)
    assert float(second_moment(log_ratio, kept)) <= bound * (1 + 1e-9)
    lowered = importance_weights(log_ratio, mask, dataclasses.replace(correction, high=1.5), advantages)
    torch.testing.assert_close(lowered, expected.clamp(max=1.5))


def test_what_m2po_leaves_out_of_some_tokens():
    """Only ratios beyond 1 on the side of their advantage; of two that are equally far both or none."""
    log_ratio = torch.tensor([[0.1, 0.9, -0.9, 0.9, -2.0, 0.1]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, 0.0, 1.0, -1.0]])
    mask = torch.ones(1, 6, dtype=torch.bool)
    found = importance_weights(log_ratio, mask, M2PO, advantages)
    assert (found == 0).tolist() == [[False, True, True, False, False, False]]
    larger = dataclasses.replace(M2PO, second_moment=0.41)  # what two of the three tokens have
    assert (importance_weights(log_ratio, mask, larger, advantages) == 0).sum() == 2
    whole = dataclasses.replace(M2PO, second_moment=0.55)
    assert (importance_weights(log_ratio, mask, whole, advantages) == 0).sum() == 0


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


GRPO = ("algorithm.estimator=grpo", "rollout.samples_per_prompt=4", "data.prompts_per_iteration=2")


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize(
    "ratios",
    [
        ("algorithm.correction.level=token",),
        ("algorithm.correction={level: token, mode: m2po}",),
        (*GRPO, "algorithm.old_log_probs=rollout"),
    ],
    ids=["token", "m2po", "rollout"],
)
def test_nan_at_observations_in_what_other_stages_computed_never_reaches_the_weights(
    models, tmp_path, group, estimator, ratios
):
    clean = experience(samples=4 if "grpo" in ratios[0] else 1, holes=True)
    names = ("rollout_log_probs", "reference_log_probs")
    dirty = {name: torch.where(clean.mask, getattr(clean, name), NAN) for name in names}
    settings = ("algorithm.kl.placement=loss", f"algorithm.kl.estimator={estimator}", "algorithm.kl.coef=1.0")
    learned = []
    for given in (clean, dataclasses.replace(clean, **dirty)):
        learner = make_learner(models, tmp_path / "run", *settings, *ratios)
        updated(learner, given, kl_coef=1.0)
        learned.append(weights(learner))
    assert difference(*learned) == 0
