"""Rewards of responses from the scores of their components, and whether a response counts. Pure."""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.run.schemas import FinishReason, Validity, is_sampled

Score = float | None
"""Score of a row; None where a rule abstains, or a reward model cannot take the response."""


def rewarded(
    scores: Sequence[Score], weights: Sequence[float], may_abstain: Sequence[bool]
) -> tuple[Score, Validity]:
    """Return the reward of one row, and whether it has one: scored, abstained or unscorable.

    Args:
        scores: the row's score by each component.
        weights: the components' weights.
        may_abstain: whether a component without a score abstains, as rules do. Others could not take the
            row, which then has no reward whatever the rest say.
    """
    if any(score is None and not may for score, may in zip(scores, may_abstain, strict=True)):
        return None, Validity.UNSCORABLE
    total = weighted_sum(scores, weights)
    return total, Validity.ABSTAINED if total is None else Validity.SCORED


def weighted_sum(scores: Sequence[Score], weights: Sequence[float]) -> Score:
    """Return the sum of one row's scores, each times its weight.

    Where components have no score, the sum of the others is multiplied by the magnitudes of all weights over
    those of the weights that count, so that it has the scale of a full one. None where the components with a
    score have no weight.
    """
    known = [(weight, score) for weight, score in zip(weights, scores, strict=True) if score is not None]
    total = sum(weight * score for weight, score in known)
    if len(known) == len(scores):
        return total
    scale = weight_scale(scores, weights)
    return None if scale is None else total * scale


def weight_scale(scores: Sequence[Score], weights: Sequence[float]) -> float | None:
    """Return what :func:`weighted_sum` multiplies the sum by."""
    if None not in scores:
        return 1.0
    counting = sum(abs(weight) for weight, score in zip(weights, scores, strict=True) if score is not None)
    return sum(map(abs, weights)) / counting if counting else None


def validities(rows: pa.Table, found: Sequence[Validity], mask_truncated: bool) -> list[Validity]:
    """Return the column ``validity`` of a reward shard: one entry per row.

    Args:
        rows: the rollout table.
        found: what :func:`rewarded` says of each row.
        mask_truncated: algorithm.mask_truncated.
    """
    prompts, sampled = rows["prompt_id"].to_pylist(), is_sampled(rows).to_pylist()
    reasons, lengths = rows["finish_reason"].to_pylist(), pc.list_value_length(rows["response_tokens"])
    known = zip(prompts, sampled, found, strict=True)
    baseless = {prompt for prompt, is_sample, one in known if not is_sample and one is not Validity.SCORED}
    column = []
    facts = zip(found, prompts, sampled, reasons, lengths.to_pylist(), strict=True)
    for one, prompt, is_sample, reason, length in facts:
        if one is Validity.SCORED and is_sample:
            one = _of_sample(prompt in baseless, reason, length, mask_truncated)
        column.append(one)
    return column


def _of_sample(is_baseless: bool, reason: str, num_tokens: int, mask_truncated: bool) -> Validity:
    """Return the validity of a sample that has a reward."""
    if is_baseless:
        return Validity.NO_BASELINE
    if reason == FinishReason.REFUSED and not num_tokens:
        return Validity.REFUSED
    if reason == FinishReason.LENGTH and mask_truncated:
        return Validity.TRUNCATED
    return Validity.SCORED
