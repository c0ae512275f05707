"""Names of the user's that would give two numbers of a row one name, or one the place of another. Pure."""

from collections.abc import Iterable, Iterator

from pipeline.config.issue import ConfigIssue
from pipeline.config.schema import Config

OF_REWARDS = frozenset(
    {"mean", "std", "min", "max", "frac_zero_std", "discarded", "shaped", "greedy", "unscored"}
)
"""Numbers of all rewards, ``reward/NAME``."""
OF_COMPONENTS = frozenset(
    {"mean", "std", "truncated", "unscored", "abstained", "late", "failed", "unreadable", "retries"}
)
"""Numbers of one component, ``reward/COMPONENT/NAME``."""
OF_EVALUATIONS = frozenset({"reward", "refused", "response_length", "num_turns"})
"""Numbers of all held-out prompts, ``evaluate/NAME``."""


def name_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield names of components, prompt files, held-out sets and environments that numbers of rows have."""
    data, made = config.data, config.data.environment
    files = data.prompts if isinstance(data.prompts, dict) else {}
    sets: dict[str, Iterable[str]] = {
        "data.heldout": data.heldout_sets,
        "data.environment.components": made.components if made else {},
    }
    yield from _taken("reward.components", config.reward.components, OF_REWARDS, "reward/{}")
    yield from _taken("data.prompts", files, OF_COMPONENTS, "reward/mean/{}")
    for key, names in sets.items():
        yield from _taken(key, names, OF_EVALUATIONS, "evaluate/{}")


def _taken(key: str, names: Iterable[str], taken: frozenset[str], number: str) -> Iterator[ConfigIssue]:
    for name in sorted(taken.intersection(names)):
        yield ConfigIssue(key, name, f"{number.format(name)} is another metric; choose another name")
