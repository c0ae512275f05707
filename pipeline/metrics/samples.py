"""A few of an iteration's responses, to be read by people: in the report and in W&B's table."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from pipeline.run.commits import CorruptData, Record, StaleData, read_record
from pipeline.run.directory import Run
from pipeline.run.seeds import derive_seed
from pipeline.run.tasks import Stage, Task

if TYPE_CHECKING:
    import pyarrow as pa

_READ_BYTES = 64 << 20
"""Bytes of rollout data to read per iteration: a few samples do not justify reading further shards."""
_COMPONENT = "reward/"
"""Prefix of the components' columns; see :func:`pipeline.run.schemas.component_column`."""


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
    """Total, before KL; NaN where a reward model could not take the response."""
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


def read_samples(run: Run, iteration: int, max_bytes: int = _READ_BYTES) -> list[Sample]:
    """Read the sampled responses of an iteration, without greedy ones, in the order of shards and rows.

    Shards that are gone or corrupt are skipped, so the result may be empty. Of an iteration with more than
    ``max_bytes`` of rollout data only some shards are read, drawn by the run's seed, at least one.
    """
    found: dict[int, list[Sample]] = {}
    read = 0
    for shard in _shard_order(run, iteration):
        if read and read >= max_bytes:
            break
        rollout = _record(run, Task(iteration, Stage.ROLLOUT, shard))
        reward = _record(run, Task(iteration, Stage.REWARD, shard))
        if rollout is not None and reward is not None:
            found[shard] = _read_shard(run, rollout, reward)
            read += sum(entry.bytes for entry in rollout.outputs)
    return [sample for shard in sorted(found) for sample in found[shard]]


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


def sample_seed(run: Run, iteration: int) -> int:
    """Derive the seed of what is drawn from an iteration, from the run's seed and the iteration only."""
    return derive_seed(run.config.seed, "samples", iteration)


def _shard_order(run: Run, iteration: int) -> list[int]:
    shards = list(range(run.plan.num_shards))
    random.Random(sample_seed(run, iteration)).shuffle(shards)
    return shards


def _record(run: Run, task: Task) -> Record | None:
    try:
        return read_record(run.paths, task)
    except CorruptData:
        return None


def _read_shard(run: Run, rollout: Record, reward: Record) -> list[Sample]:
    """Read a shard's samples; none if a file is unreadable, not as committed, or of another schema."""
    from pipeline.run.schemas import SchemaError

    try:
        return read_pair(run, rollout, reward)
    except (CorruptData, StaleData, SchemaError, OSError):
        return []


def read_pair(run: Run, rollout: Record, reward: Record, rows: Sequence[int] | None = None) -> list[Sample]:
    """Read the sampled responses of a shard and their scores.

    Args:
        rows: rows of the shard to read, in this order; None for all but greedy ones.

    Raises:
        CorruptData: a file is not what was committed.
        StaleData: the scores are of other responses than there are now.
        SchemaError: a file is of another version of slurm-ppo.
    """
    from pipeline.run.schemas import REWARD, ROLLOUT, is_sampled
    from pipeline.run.shards import read_shard

    texts = read_shard(run.paths, rollout, ROLLOUT)
    scores = read_shard(run.paths, reward, REWARD)
    if not all(texts[name].equals(scores[name]) for name in ("prompt_id", "sample_index")):
        raise StaleData(reward.task, f"it scored other responses than {rollout.task} holds now")
    if rows is not None:
        return _samples(rollout.task.iteration, texts.take(rows), scores.take(rows))
    sampled = is_sampled(texts)
    return _samples(rollout.task.iteration, texts.filter(sampled), scores.filter(sampled))


def _samples(iteration: int, texts: "pa.Table", scores: "pa.Table") -> list[Sample]:
    columns = [
        *(texts[name].to_pylist() for name in ("prompt_id", "sample_index", "prompt_text", "response_text")),
        _numbers(scores["reward"]),
        _components(scores),
        _kls(texts, scores),
        [len(tokens) for tokens in texts["response_tokens"]],
        texts["finish_reason"].to_pylist(),
        texts["num_turns"].to_pylist(),
        [_turns(text) for text in texts["response_messages"].to_pylist()],
    ]
    return [Sample(iteration, *row) for row in zip(*columns, strict=True)]


def _turns(text: str | None) -> tuple[Turn, ...]:
    """Parse the messages of a conversation (response_messages)."""
    messages = json.loads(text) if text else ()
    return tuple(Turn(str(message["role"]), str(message["content"])) for message in messages)


def _components(scores: "pa.Table") -> list[dict[str, float]]:
    """Return each row's component scores by name: [rows]."""
    columns = [name for name in scores.column_names if name.startswith(_COMPONENT)]
    names = [name.removeprefix(_COMPONENT) for name in columns]
    if not names:
        return [{} for _ in range(scores.num_rows)]
    values = zip(*(_numbers(scores[column]) for column in columns), strict=True)
    return [dict(zip(names, row, strict=True)) for row in values]


def _numbers(column: "pa.ChunkedArray") -> list[float]:
    """Return scores, NaN for a response that a reward model could not take."""
    return [math.nan if value is None else value for value in column.to_pylist()]


def _kls(texts: "pa.Table", scores: "pa.Table") -> list[float | None]:
    """Compute :attr:`Sample.kl` of each row: [rows]."""
    names = ("rollout_logprobs", "response_mask")
    columns = (*(texts[name] for name in names), scores["reference_logprobs"])
    return [_kl(*row) for row in zip(*columns, strict=True)]


def _kl(rollout: "pa.ListScalar", mask: "pa.ListScalar", reference: "pa.ListScalar") -> float | None:
    if not reference.is_valid:
        return None
    gaps = rollout.values.to_numpy() - reference.values.to_numpy()
    return float(gaps[mask.values.to_numpy(zero_copy_only=False)].sum(dtype="float64"))
