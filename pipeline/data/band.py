"""Prompts that an epoch leaves out, as their last responses scored too low or too high (data.band).

Each update commits a table of the prompts that were scored so far: in which epoch, with which mean reward,
and whether the epoch of the first iteration that is rolled out with its policy leaves them out. What an epoch
leaves out is decided once, for its first iteration. So all of it is a function of committed files, whatever
is computed again. The arithmetic is pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.schema import BandConfig, Config
from pipeline.data.sampler import Indices, Portion
from pipeline.run.schemas import BAND, PROMPT_INDEX, Validity, conform, is_sampled

Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
Numbers = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Standing:
    """What is known of all N usable prompts of a run."""

    epochs: Indices
    """[N] 0-based epoch of the prompt's file in which it was last scored; -1 for never."""
    rewards: Numbers
    """[N] mean reward that it had then; NaN for none."""
    is_out: Flags
    """[N] whether the next rollout's epoch leaves it out."""

    @classmethod
    def of(cls, table: pa.Table, num_prompts: int) -> "Standing":
        """Read a table of the schema BAND."""
        found = cls(
            np.full(num_prompts, -1, dtype=np.int64),
            np.full(num_prompts, np.nan),
            np.zeros(num_prompts, dtype=np.bool_),
        )
        indices = table[PROMPT_INDEX].to_numpy()
        for name, values in vars(found).items():
            values[indices] = table[_COLUMNS[name]].to_numpy()
        return found

    @property
    def left_out(self) -> Indices:
        """Indices of the prompts that are left out, ascending."""
        return np.flatnonzero(self.is_out)

    def table(self) -> pa.Table:
        """Return a row for each prompt that was scored."""
        indices = np.flatnonzero(self.epochs >= 0)
        columns = {_COLUMNS[name]: values[indices] for name, values in vars(self).items()}
        return conform({PROMPT_INDEX: indices, **columns}, BAND)


_COLUMNS = {"epochs": "epoch", "rewards": "mean_reward", "is_out": "is_out"}


def mean_rewards(rollouts: pa.Table, rewards: pa.Table) -> dict[int, float]:
    """Return the mean reward of each prompt's samples that have one, by its index.

    Args:
        rollouts: rows of a rollout shard that has the column prompt_index.
        rewards: the same rows of its reward shard.
    """
    has_reward = pc.is_in(rewards["validity"], pa.array([v.value for v in Validity if v.has_reward]))
    pairs = pa.table({"index": rollouts[PROMPT_INDEX], "reward": pc.cast(rewards["reward"], pa.float64())})
    counted = pairs.filter(pc.and_(is_sampled(rewards), has_reward))
    means = counted.group_by("index", use_threads=False).aggregate([("reward", "mean")])
    return dict(zip(means["index"].to_pylist(), means["reward_mean"].to_pylist(), strict=True))


def standing_after(
    before: Standing,
    scored: Mapping[int, float],
    iteration: int,
    upcoming: int,
    portions: Sequence[Portion],
    band: BandConfig,
) -> Standing:
    """Return what is known after an iteration.

    Args:
        scored: mean rewards of its prompts, by index.
        upcoming: first iteration that is rolled out with its policy.
        portions: of all usable prompts.
    """
    epochs, rewards, is_out = before.epochs.copy(), before.rewards.copy(), before.is_out.copy()
    indices = np.array(sorted(scored), dtype=np.int64)
    rewards[indices] = [scored[index] for index in indices.tolist()]
    for portion in (one for one in portions if one.share):
        own, rows = indices[(indices >= portion.start) & (indices < portion.rows.stop)], portion.rows
        epochs[own], _ = portion.epoch_of(iteration)
        epoch, turn = portion.epoch_of(upcoming)
        if turn == 0:
            is_out[rows] = outside(epochs[rows], rewards[rows], epoch, portion.share, band)
    return Standing(epochs, rewards, is_out)


def band_warnings(config: Config, counts: Mapping[str, int]) -> Iterator[str]:
    """Warn of a run that ends before an epoch could leave anything out.

    Args:
        counts: usable prompts by the name of their file; without weights all are put together.
    """
    shares = config.prompt_shares or {"": config.prompts_per_rollout}
    numbers = counts if config.prompt_shares else {"": sum(counts.values())}
    epochs = [numbers.get(name, 0) // share for name, share in shares.items() if share]
    if config.data.band.is_given and config.iterations <= (shortest := min(epochs)):
        yield (
            f"warning: data.band leaves no prompt out: the first epoch, which has all, takes {shortest:,} "
            f"iterations, and the run has iterations={config.iterations}"
        )


def outside(epochs: Indices, rewards: Numbers, epoch: int, least: int, band: BandConfig) -> Flags:
    """Return which prompts an epoch leaves out, [N], so that ``least`` of them stay."""
    lowest = -np.inf if band.lowest is None else band.lowest
    highest = np.inf if band.highest is None else band.highest
    distances = np.maximum(lowest - rewards, rewards - highest)
    found: Flags = (epochs >= 0) & (epoch - epochs <= band.rest) & (distances > 0)
    lack = least - np.count_nonzero(~found)
    if lack > 0:
        resting = np.flatnonzero(found)
        found[resting[np.argsort(distances[resting], kind="stable")[:lack]]] = False
    return found
