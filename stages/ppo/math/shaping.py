"""Shaping of responses' scores before advantages are computed. Shapes: [N], one entry per response."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.config.algorithm import ShapingConfig


@dataclass(frozen=True)
class ShapingInput:
    """The inputs of score shaping."""

    scores: Tensor
    """[N] total reward."""
    lengths: Tensor
    """[N] tokens of the response."""
    has_ended: Tensor
    """[N] true where the response ended by itself, not at a limit."""

    def select(self, indices: Tensor) -> "ShapingInput":
        """Return the responses of the given indices."""
        return ShapingInput(self.scores[indices], self.lengths[indices], self.has_ended[indices])

    def followed_by(self, other: "ShapingInput") -> "ShapingInput":
        """Return these responses and then the other ones."""
        pairs = (self.scores, other.scores), (self.lengths, other.lengths), (self.has_ended, other.has_ended)
        return ShapingInput(*map(torch.cat, pairs))


@dataclass(frozen=True)
class RunningMoments:
    """Count, mean and sum of squared deviations of all numbers seen so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def including(self, values: Tensor) -> "RunningMoments":
        """Add numbers (Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983)."""
        added = values.double()
        if len(added) == 0:
            return self
        count, mean = self.count + len(added), float(added.mean())
        difference = mean - self.mean
        squares = float(((added - mean) ** 2).sum())
        between = difference**2 * self.count * len(added) / count
        return RunningMoments(
            count, self.mean + difference * len(added) / count, self.squares + squares + between
        )

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 1 where it is not known or 0, so that one may divide by it."""
        variance = self.squares / (self.count - 1) if self.count > 1 else 0.0
        return variance**0.5 or 1.0


def shaped_scores(
    outcome: ShapingInput, moments: RunningMoments, config: ShapingConfig, max_new_tokens: int
) -> Tensor:
    """Return shaped scores [N]. Penalties come last, so that they are relative to normalised, limited scores.

    Args:
        moments: moments of all scores of the run up to and with these; used if scores are normalised.
    """
    scores = outcome.scores
    # 1. normalise
    if config.normalize:
        scores = (scores - moments.mean) / moments.std
    # 2. limit
    if config.clip is not None:
        scores = scores.clamp(-config.clip, config.clip)
    # 3. penalties
    scores = scores - missing_eos_penalty(outcome.has_ended, config.missing_eos_penalty)
    if config.overlong_buffer is not None:
        scores = scores - overlong_penalty(
            outcome.lengths, max_new_tokens, config.overlong_buffer, config.overlong_penalty
        )
    return scores


def missing_eos_penalty(has_ended: Tensor, penalty: float) -> Tensor:
    """Return [N] ``penalty`` where the response did not end by itself (arXiv 1909.08593 and TRL)."""
    return penalty * (~has_ended).float()


def overlong_penalty(lengths: Tensor, max_new_tokens: int, buffer: int, penalty: float) -> Tensor:
    """Return [N] 0 up to ``max_new_tokens - buffer`` tokens, from there growing linearly to ``penalty`` at
    max_new_tokens (DAPO's soft overlong punishment, arXiv 2503.14476 equation 13)."""
    beyond = lengths - (max_new_tokens - buffer)
    return penalty * (beyond / buffer).clamp(0.0, 1.0)


def flat_groups(scores: Tensor, groups: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return [N] true where all scores of the row's group, of two rows or more, are equal: a group estimator
    learns nothing from it.

    Args:
        scores: [N], or [S] of the steps of all rows.
        groups: [N] index of each row's prompt.
        rows: [S] row of each step; None where each row has one score.
    """
    of, number = groups if rows is None else groups[rows], len(groups)
    highest = scores.new_full((number,), -torch.inf).scatter_reduce(0, of, scores, "amax")
    lowest = scores.new_full((number,), torch.inf).scatter_reduce(0, of, scores, "amin")
    has_others = torch.bincount(groups, minlength=number) > 1
    return ((highest <= lowest) & has_others)[groups]  # a group without a step has less than any number
