"""Iterations that an update learned again before it began, as its commit record tells of them."""

from collections.abc import Mapping
from enum import StrEnum

REPLAYED = "replay/iterations"
"""Names of metrics of an update's record: how many iterations were learned again."""
DIFFERENCE = "replay/difference"
"""The largest difference to a committed policy, relative to what its iteration changed."""
UNEXPECTED = "replay/unexpected"
"""How many iterations differ from what the very same machine learned before."""
GIVEN_UP = "replay/given_up"
"""1 where one could not be learned again, so that learning went on from the committed weights; else 0."""
METRICS = frozenset({REPLAYED, DIFFERENCE, UNEXPECTED, GIVEN_UP})

WORTH_A_WARNING = 0.01
"""Difference above which a warning is printed."""


class Level(StrEnum):
    """How much of a person's attention a replay deserves."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def level_of(metrics: Mapping[str, float]) -> Level:
    """Judge a replay by the metrics of an update's record that has them."""
    if metrics[UNEXPECTED]:
        return Level.ERROR
    is_apart = metrics[DIFFERENCE] > WORTH_A_WARNING or metrics[GIVEN_UP]
    return Level.WARNING if is_apart else Level.INFO


def in_words(metrics: Mapping[str, float]) -> str:
    """Return a line for a person; says what follows from the level."""
    count, difference = int(metrics[REPLAYED]), metrics[DIFFERENCE]
    what = "1 iteration" if count == 1 else f"{count} iterations"
    text = f"the trainer's state was learned again over {what}"
    text += f", which differ from the committed policies by {difference:.1e} of what they changed"
    if metrics[GIVEN_UP]:
        text += "; one more could not be learned again, and learning goes on with older moments"
    if metrics[UNEXPECTED]:
        return f"{text}; the same machine and versions should give no difference, so something is amiss"
    return f"{text}, more than {WORTH_A_WARNING:g}" if difference > WORTH_A_WARNING else text
