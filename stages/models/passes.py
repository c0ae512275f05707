"""Tokens that go through models while a task computes, and the positions that are computed for them.

Whatever puts sequences together for a model counts them here: engines, the reference, the learner. A token
counts once for every pass: of the reference, of old log-probabilities, of each step's forward pass.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

TOKENS, POSITIONS = "model_tokens", "model_positions"
"""Names of both counts among a record's metrics."""


@dataclass(frozen=True)
class PassedTokens:
    """Counts of one task."""

    tokens: float = 0.0
    """Tokens of prompts and responses."""
    positions: float = 0.0
    """Positions that were computed: these tokens, and the padding between them."""

    def plus(self, other: "PassedTokens") -> "PassedTokens":
        return PassedTokens(self.tokens + other.tokens, self.positions + other.positions)

    def metrics(self) -> dict[str, float]:
        """Return the counts by their names in a record; none where nothing was counted."""
        return {TOKENS: self.tokens, POSITIONS: self.positions} if self.positions else {}

    @staticmethod
    def of(metrics: Mapping[str, float]) -> "PassedTokens":
        """Return the counts among a record's metrics."""
        return PassedTokens(metrics.get(TOKENS, 0.0), metrics.get(POSITIONS, 0.0))


_counted = PassedTokens()


def count_pass(tokens: float, positions: float | None = None) -> None:
    """Count tokens that went through a model.

    Args:
        positions: positions computed for them. Default: no padding.
    """
    global _counted
    _counted = _counted.plus(PassedTokens(tokens, tokens if positions is None else positions))


def counted_passes() -> PassedTokens:
    """Return what was counted since :func:`forget_passes`."""
    return _counted


def forget_passes() -> None:
    """Begin to count again, for another task."""
    global _counted
    _counted = PassedTokens()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Leave out what goes through models in this block: work that is done again."""
    global _counted
    before = _counted
    try:
        yield
    finally:
        _counted = before
