"""Numbers of an evaluation: means, and pass@k of several samples, over all prompts and for each set. Pure."""

import math
import statistics as stats
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampled:
    """How responses were sampled, and what of it is counted."""

    num_samples: int
    """Responses to each prompt, side by side."""
    pass_at: Sequence[int] = ()
    """Values of k for pass@k."""
    solved_at: float = 1.0
    """Least reward of a response that counts as solved."""


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the probability that one of ``k`` samples at least is solved, estimated without bias from
    ``num_samples`` of which ``num_solved`` are: 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374)."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs k from 1 to {num_samples}, the number of samples")
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def evaluation_numbers(
    scores: Mapping[str, Sequence[float | None]], sets: Sequence[str], sampled: Sampled | None
) -> dict[str, float]:
    """Return metrics of all responses, and of each set of prompts.

    Args:
        scores: ``reward`` and its components, one number per response; None where a reward model could not
            take it, which no mean counts, and which solves nothing.
        sets: name of each response's set; empty where there is one set only.
        sampled: None for greedy responses.
    """
    found = _numbers("evaluate", scores, sampled)
    for name in dict.fromkeys(sets):
        chosen = [index for index, of_response in enumerate(sets) if of_response == name]
        picked = {key: [values[i] for i in chosen] for key, values in scores.items()}
        found |= _numbers(f"evaluate/{name}", picked, sampled)
    return found


def _numbers(
    prefix: str, scores: Mapping[str, Sequence[float | None]], sampled: Sampled | None
) -> dict[str, float]:
    known = {name: [value for value in values if value is not None] for name, values in scores.items()}
    found = {f"{prefix}/{name}": stats.fmean(values) for name, values in known.items() if values}
    if sampled is None:
        return found
    size, rewards = sampled.num_samples, scores["reward"]
    if known["reward"]:
        found[f"{prefix}/mean@{size}"] = found[f"{prefix}/reward"]
    groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
    solved = [sum(reward is not None and reward >= sampled.solved_at for reward in group) for group in groups]
    for k in sampled.pass_at:
        found[f"{prefix}/pass@{k}"] = stats.fmean(pass_at_k(size, count, k) for count in solved)
    return found
