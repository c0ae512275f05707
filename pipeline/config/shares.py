"""Shares: a number divided by weights, and lists mixed evenly. Pure."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

_Any = TypeVar("_Any")


def divided(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Divide a number by the weights: by the largest remainder, of equal ones the first."""
    scale = total / sum(weights.values())
    found = {name: int(weight * scale) for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: found[name] - weights[name] * scale)
    for name in by_remainder[: total - sum(found.values())]:
        found[name] += 1
    return found


def mixed(lists: Mapping[str, Sequence[_Any]]) -> list[_Any]:
    """Return the items of all lists in one order, in every part of which each list has its share."""
    placed = [
        ((index + 0.5) / len(some), order, item)
        for order, some in enumerate(lists.values())
        for index, item in enumerate(some)
    ]
    return [item for _, _, item in sorted(placed, key=lambda one: one[:2])]
