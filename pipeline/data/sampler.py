"""Dealing of prompts to iterations and their shards."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.config.shares import mixed
from pipeline.run.seeds import derive_seed

Indices = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
NONE: Indices = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Deal:
    """The prompts of one shard of one iteration: 0-based ``epoch``, and ``indices`` into the usable rows."""

    epoch: int
    indices: tuple[int, ...]
    epochs: Mapping[str, int] = field(default_factory=dict)
    """Epoch of each file of prompts, where they have weights; :attr:`epoch` is then the least."""
    num_left_out: int = 0
    """Prompts that the epoch leaves out."""


@dataclass(frozen=True)
class Portion:
    """The usable rows of one of several files, which follow each other among all usable rows; or all."""

    name: str
    start: int
    """Index of the first of them."""
    num_prompts: int
    share: int
    """How many of them each iteration has."""

    @property
    def rows(self) -> slice:
        """The usable rows that it is of."""
        return slice(self.start, self.start + self.num_prompts)

    def epoch_of(self, iteration: int) -> tuple[int, int]:
        """Return the 0-based epoch of a 1-based iteration, and which one of the epoch it is."""
        return divmod(iteration - 1, self.num_prompts // self.share)


def deal(
    num_prompts: int,
    *,
    iteration: int,
    prompts_per_iteration: int,
    num_shards: int,
    shard: int,
    seed: int,
    shuffle: bool,
    left_out: Indices = NONE,
) -> Deal:
    """Return the prompts of one shard of one 1-based iteration, as a pure function of the arguments.

    An epoch is an order of all prompts, cut into iterations, and those into contiguous shards. The rest
    at an epoch's end is not dealt in that epoch, so that no iteration has a prompt twice.

    Args:
        left_out: indices that the epoch has not, as :mod:`pipeline.data.band` says; the others come up in
            rounds, each in an order of its own and cut likewise, until the epoch is as long as with all.

    Raises:
        ValueError: there are fewer prompts than one iteration needs.
    """
    assert iteration >= 1, iteration
    assert 0 <= shard < num_shards, (shard, num_shards)
    assert prompts_per_iteration % num_shards == 0, (prompts_per_iteration, num_shards)
    if num_prompts < prompts_per_iteration:
        raise ValueError(
            f"{num_prompts} usable prompts are fewer than the {prompts_per_iteration} of one iteration; "
            f"set data.prompts_per_iteration to at most {num_prompts}, or give more prompts"
        )
    epoch, turn = divmod(iteration - 1, num_prompts // prompts_per_iteration)
    there = np.setdiff1d(np.arange(num_prompts), left_out, assume_unique=True)
    number, turn = divmod(turn, len(there) // prompts_per_iteration)
    size = prompts_per_iteration // num_shards
    start = turn * prompts_per_iteration + shard * size
    order = there[_order(len(there), seed, epoch, number)] if shuffle else there
    return Deal(epoch, tuple(order[start : start + size].tolist()), num_left_out=len(left_out))


def _order(num_prompts: int, seed: int, epoch: int, number: int) -> Indices:
    """Return a permutation of ``range(num_prompts)``, of a round of an epoch, that depends on nothing but the
    arguments.

    numpy guarantees the stream of raw integers of Philox across its versions, but not what
    ``Generator.permutation`` makes of it; hence the prompts are sorted by one raw integer each.
    """
    later = ("round", number) if number else ()
    raw = np.random.Philox(key=derive_seed(seed, "epoch", epoch, *later)).random_raw(num_prompts)
    return np.argsort(raw, kind="stable")


def portions(counts: Sequence[tuple[str, int]], shares: Mapping[str, int]) -> list[Portion]:
    """Return the portions of files of which name and number of usable rows are given in their order."""
    starts = itertools.accumulate((number for _, number in counts), initial=0)
    return [
        Portion(name, start, number, shares[name])
        for (name, number), start in zip(counts, starts, strict=False)
    ]


def deal_portions(
    portions: Sequence[Portion],
    *,
    iteration: int,
    num_shards: int,
    shard: int,
    seed: int,
    shuffle: bool,
    left_out: Indices = NONE,
) -> Deal:
    """Return the prompts of one shard of one 1-based iteration, of which each portion has its share: each is
    dealt as by :func:`deal`, in epochs and an order of its own, and their prompts are mixed evenly. One
    portion without a name is all prompts.

    Raises:
        ValueError: a file has fewer prompts than its share.
    """
    found: dict[str, list[int]] = {}
    epochs: dict[str, int] = {}
    for one in portions:
        if not one.share:
            continue
        is_own = (left_out >= one.start) & (left_out < one.rows.stop)
        dealt = deal(
            one.num_prompts,
            iteration=iteration,
            prompts_per_iteration=one.share,
            num_shards=1,
            shard=0,
            seed=derive_seed(seed, "file", one.name) if one.name else seed,
            shuffle=shuffle,
            left_out=left_out[is_own] - one.start,
        )
        found[one.name], epochs[one.name] = [one.start + index for index in dealt.indices], dealt.epoch
    order = mixed(found)
    size = len(order) // num_shards
    some = tuple(order[shard * size : (shard + 1) * size])
    named = {name: epoch for name, epoch in epochs.items() if name}
    return Deal(min(epochs.values()), some, named, len(left_out))
