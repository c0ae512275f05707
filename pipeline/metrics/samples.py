"""Responses of an iteration with their scores, and which of them are shown. Pure."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa


class Choice(StrEnum):
    """Reason for which a sample was chosen."""

    BEST = "best"
    """One of the highest total rewards of the samples read."""
    WORST = "worst"
    """One of the lowest."""
    RANDOM = "random"
    """Random draw from the others."""


class Rewarded(Protocol):
    """Anything that has a reward."""

    @property
    def reward(self) -> float: ...


AnyRewarded = TypeVar("AnyRewarded", bound=Rewarded)


class Turn(NamedTuple):
    """Message of a conversation of several turns."""

    role: str
    """``assistant`` for what the policy wrote; else who spoke, such as ``tool`` or ``user``."""
    text: str


@dataclass(frozen=True)
class Sample:
    """One response, its prompt and its scores."""

    iteration: int
    prompt_id: str
    sample_index: int
    """0 to n - 1 among the responses to a prompt."""
    prompt: str
    """Text that the policy was given, chat template included."""
    response: str
    """All of the response, of several turns too."""
    reward: float
    """Total, before KL; NaN where a reward model could not take the response, or rules abstain."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Scores by component name, before their weights."""
    kl: float | None = None
    """Rollout minus reference log-probability, summed over the policy's own tokens (k1); None where the
    reward shard has no reference's: KL is off, or the update computes them."""
    length: int = 0
    """Response tokens, those between the policy's turns included."""
    finish_reason: str = ""
    """stop, length or refused; see :class:`pipeline.run.schemas.FinishReason`."""
    num_turns: int = 1
    """Turns of the policy."""
    turns: tuple[Turn, ...] = ()
    """With rollout.multi_turn what followed the prompt, message by message; otherwise none."""


def choose(
    samples: Sequence[AnyRewarded], best: int = 4, worst: int = 4, at_random: int = 8, seed: int = 0
) -> list[tuple[Choice, AnyRewarded]]:
    """Choose the highest rewards, descending, the lowest, ascending, and some others, by the seed. Pure.

    No sample is chosen twice: of few samples the best come first. NaN rewards are only chosen at random.
    """
    ranked = sorted((s for s in samples if s.reward == s.reward), key=lambda sample: sample.reward)
    highest = ranked[::-1][:best]
    lowest = ranked[: max(0, min(worst, len(ranked) - len(highest)))]
    taken = {id(sample) for sample in (*highest, *lowest)}
    others = [sample for sample in samples if id(sample) not in taken]
    drawn = random.Random(seed).sample(others, min(at_random, len(others)))
    groups = ((Choice.BEST, highest), (Choice.WORST, lowest), (Choice.RANDOM, drawn))
    return [(choice, sample) for choice, group in groups for sample in group]


@dataclass(frozen=True)
class Damage:
    """Something of a run that was committed and cannot be read."""

    what: str
    """The task that made it, e.g. ``iteration 3 reward shard 1``."""
    why: str
    """What is wrong, with the file's name."""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True)
class Samples:
    """Responses of an iteration, with their scores, and what could not be read of it."""

    iteration: int
    """Iteration that made them."""
    rows: tuple[Sample, ...]
    """Responses, without greedy ones: chosen ones in the order of the choice, else by shard and row."""
    choices: tuple[Choice | None, ...]
    """Reason why each of ``rows`` was chosen; None where all are given."""
    num_scored: int
    """Responses of the iteration that have a reward and can be read, chosen or not."""
    reward_mean: float | None
    """Mean reward of these; None where there are none."""
    damage: tuple[Damage, ...] = ()
    """Shards that are left out because they cannot be read."""
    num_pending: int = 0
    """Shards that are not scored yet."""
    lag: int = 0
    """Updates by which the policy that wrote them is older than that of the iteration before
    (rollout.staleness)."""

    refill: Mapping[str, int] = field(default_factory=dict)
    """With rollout.oversample, once the update is committed: numbers of prompts, by the names of the metrics
    ``refill/*`` without that prefix."""

    @property
    def writer(self) -> int:
        """Version of the policy that wrote them."""
        return self.iteration - 1 - self.lag

    def table(self) -> "pa.Table":
        """Return the rows as an Arrow table: a column for each attribute of ``Sample``, ``reward/NAME`` for
        each component of the reward, and ``choice``. ``turns`` are lists of structs ``role``, ``text``."""
        import pyarrow as pa

        turns = pa.list_(pa.struct([("role", pa.string()), ("text", pa.string())]))
        kinds: dict[object, pa.DataType] = {
            int: pa.int64(),
            float: pa.float64(),
            float | None: pa.float64(),
            str: pa.string(),
        }
        columns = {
            one.name: pa.array([getattr(s, one.name) for s in self.rows], kinds[one.type])
            for one in fields(Sample)
            if one.type in kinds
        }
        columns["turns"] = pa.array([[turn._asdict() for turn in s.turns] for s in self.rows], turns)
        for component in dict.fromkeys(name for sample in self.rows for name in sample.components):
            scores = [sample.components.get(component) for sample in self.rows]
            columns[f"reward/{component}"] = pa.array(scores, pa.float64())
        columns["choice"] = pa.array([choice and str(choice) for choice in self.choices], pa.string())
        return pa.table(columns)
