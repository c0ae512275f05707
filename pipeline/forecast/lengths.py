"""Lengths of prompts in tokens, as far as they are known before a run. Pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MOST = 0.95
"""Share of prompts for the percentile of lengths that is reported beside the maximum."""


@dataclass(frozen=True)
class PromptLengths:
    """Lengths of the usable prompts of one file, or of the tasks of environments. In tokens."""

    key: str
    """Key of the configuration that names them."""
    number: int
    """Prompts that were measured."""
    shortest: int
    median: int
    most: int
    """Length of :data:`MOST` of them at most."""
    longest: int
    mean: float
    num_over: int
    """Prompts beside them that are longer than the limit: left out, or cut to it and counted in these too."""


def lengths_of(key: str, lengths: Sequence[int], num_over: int) -> PromptLengths | None:
    """Sum up lengths; None where there are none."""
    if not lengths:
        return None
    ranked = sorted(lengths)
    median, most = (ranked[math.ceil(share * len(ranked)) - 1] for share in (0.5, MOST))
    mean = statistics.fmean(ranked)
    return PromptLengths(key, len(ranked), ranked[0], median, most, ranked[-1], mean, num_over)
