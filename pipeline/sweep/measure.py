"""What the runs of a sweep are compared by."""

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.config.evaluate import HELDOUT_REWARD, Best, EvaluateConfig


@dataclass(frozen=True)
class Measure:
    """Number by which runs choose their best policy."""

    metric: str
    is_lowest_best: bool

    @property
    def title(self) -> str:
        return "held-out reward" if self.metric == HELDOUT_REWARD else self.metric

    @property
    def in_words(self) -> str:
        """What groups are ordered by."""
        what = "reward on held-out prompts" if self.metric == HELDOUT_REWARD else self.metric
        return f"{what}{', the lowest first,' if self.is_lowest_best else ''} where there is one"


def measure_of(given: Iterable[EvaluateConfig]) -> Measure | None:
    """Return the measure of the best policy that all of them name; None where they differ. Pure."""
    found = {Measure(one.best, one.best_is is Best.LOWEST) for one in given}
    return found.pop() if len(found) == 1 else None
