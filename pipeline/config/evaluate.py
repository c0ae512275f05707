"""The configuration of evaluation: on held-out prompts, and by a program of the user's."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeline.config.notify import Words
from pipeline.config.types import (
    FiniteFloat,
    MetricName,
    NonNegativeInt,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    Seed,
)

HELDOUT_REWARD = "evaluate/reward"
"""Metric by which the best policy is chosen by default."""
COMMAND_PREFIX = "eval/"
"""Beginning of the names of the numbers that evaluate.command writes."""
PLACEHOLDERS = ("policy", "output", "iteration", "seed")
"""What evaluate.command is given, as ``{policy}`` and so on."""
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")


class Best(StrEnum):
    """Which value of evaluate.best is the best one."""

    HIGHEST = "highest"
    LOWEST = "lowest"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Responses to held-out prompts, scored like a rollout, and a program that measures policies; the best
    policy is kept track of."""

    every: NonNegativeInt = 0
    """Evaluate policy 0, every this many iterations, and the last one. 0: never."""
    num_prompts: PositiveInt | None = None
    """Use the first this many held-out prompts of each set. Default: all."""
    num_threads: PositiveInt = 1
    """CPU threads of the task."""
    samples_per_prompt: PositiveInt | None = None
    """Responses sampled to each held-out prompt. Default: one, which is greedy."""
    temperature: PositiveFloat | None = None
    """Sampling temperature of samples_per_prompt. Default: rollout.temperature."""
    top_p: OpenFraction | None = None
    """Nucleus sampling of samples_per_prompt. Default: rollout.top_p."""
    top_k: NonNegativeInt | None = None
    """Tokens to sample from, 0 for all, with samples_per_prompt. Default: rollout.top_k."""
    seed: Seed | None = None
    """Seed of samples_per_prompt, the same for every policy, so that curves differ by the policy alone.
    Default: the run's seed."""
    pass_at: tuple[PositiveInt, ...] | None = None
    """Values of k for pass@k, each at most samples_per_prompt. Default: 1 and samples_per_prompt."""
    solved_at: FiniteFloat = 1.0
    """Least reward of a response that counts as solved, for pass@k."""
    command: Words | None = None
    """Program that measures a policy, a list or one text, without a shell. {policy} becomes the policy's
    directory and {output} the file to write, a JSON object of numbers; {iteration} and {seed} may be used."""
    command_every: PositiveInt | None = None
    """Measure policy 0, every this many iterations, and the last one with the program. Default: as every."""
    command_seconds: PositiveInt = 3600
    """Seconds that the program may take before it is stopped, which is a failure."""
    command_attempts: PositiveInt = 2
    """Tries per policy and per call of submit, run or resume, before its numbers are missing. Training goes
    on, whatever the program does."""
    best: MetricName = HELDOUT_REWARD
    """Metric by which the best policy is chosen, such as evaluate/NAME/reward or eval/NAME."""
    best_is: Best = Best.HIGHEST
    """Whether the highest or the lowest value of it is the best."""

    @property
    def pass_at_all(self) -> tuple[int, ...]:
        """Values of k for pass@k, ascending; none without samples."""
        count = self.samples_per_prompt
        return tuple(sorted({1, count} if self.pass_at is None else {*self.pass_at})) if count else ()

    @property
    def measured_every(self) -> int:
        """Iterations between runs of the program; 0: never."""
        return (self.command_every or self.every) if self.command else 0

    @property
    def best_is_measured(self) -> bool:
        """Whether the best policy is chosen by a number that the program writes."""
        return self.best.startswith(COMMAND_PREFIX)


def placeholders_in(words: Sequence[str]) -> list[str]:
    """Return the names in braces that occur in a command's words, in order."""
    return [name for word in words for name in _PLACEHOLDER.findall(word)]


def filled_in(words: Sequence[str], values: dict[str, str]) -> list[str]:
    """Return a command's words with values in place of ``{NAME}``. A value never becomes several words, and
    what it holds is not checked again."""
    return [_PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), word) for word in words]
