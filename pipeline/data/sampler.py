"""Dealing of prompts to iterations and their shards."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.config.shares import mixed
from pipeline.run.seeds import derive_seed


@dataclass(frozen=True)
class Deal:
    """The prompts of one shard of one iteration: 0-based ``epoch``, and ``indices`` into the usable rows."""

    epoch: int
    indices: tuple[int, ...]
    epochs: Mapping[str, int] = field(default_factory=dict)
    """Epoch of each file of prompts, where they have weights; :attr:`epoch` is then the least."""


@dataclass(frozen=True)
class Portion:
    """The usable rows of one of several files, which follow each other among all usable rows."""

    name: str
    start: int
    """Index of the first of them."""
    num_prompts: int
    share: int
    """How many of them each iteration has."""


def deal(
    num_prompts: int,
    *,
    iteration: int,
    prompts_per_iteration: int,
    num_shards: int,
    shard: int,
    seed: int,
    shuffle: bool,
) -> Deal:
    """Return the prompts of one shard of one 1-based iteration, as a pure function of the arguments.

    An epoch is an order of all prompts, cut into iterations, and those into contiguous shards. The rest
    at an epoch's end is not dealt in that epoch, so that no iteration has a prompt twice.

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
    size = prompts_per_iteration // num_shards
    start = turn * prompts_per_iteration + shard * size
    order = _epoch_order(num_prompts, seed, epoch) if shuffle else np.arange(num_prompts)
    return Deal(epoch, tuple(order[start : start + size].tolist()))


def _epoch_order(num_prompts: int, seed: int, epoch: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return a permutation of ``range(num_prompts)`` that depends on nothing but the arguments.

    numpy guarantees the stream of raw integers of Philox across its versions, but not what
    ``Generator.permutation`` makes of it; hence the prompts are sorted by one raw integer each.
    """
    raw = np.random.Philox(key=derive_seed(seed, "epoch", epoch)).random_raw(num_prompts)
    return np.argsort(raw, kind="stable")


def portions(counts: Sequence[tuple[str, int]], shares: Mapping[str, int]) -> list[Portion]:
    """Return the portions of files of which name and number of usable rows are given in their order."""
    starts = itertools.accumulate((number for _, number in counts), initial=0)
    return [
        Portion(name, start, number, shares[name])
        for (name, number), start in zip(counts, starts, strict=False)
    ]


def deal_by_weight(
    portions: Sequence[Portion], *, iteration: int, num_shards: int, shard: int, seed: int, shuffle: bool
) -> Deal:
    """Return the prompts of one shard of one 1-based iteration, of which each file has its share: each is
    dealt as by :func:`deal`, in epochs and an order of its own, and their prompts are mixed evenly.

    Raises:
        ValueError: a file has fewer prompts than its share.
    """
    found: dict[str, list[int]] = {}
    epochs: dict[str, int] = {}
    for one in portions:
        if not one.share:
            continue
        dealt = deal(
            one.num_prompts,
            iteration=iteration,
            prompts_per_iteration=one.share,
            num_shards=1,
            shard=0,
            seed=derive_seed(seed, "file", one.name),
            shuffle=shuffle,
        )
        found[one.name], epochs[one.name] = [one.start + index for index in dealt.indices], dealt.epoch
    order = mixed(found)
    size = len(order) // num_shards
    return Deal(min(epochs.values()), tuple(order[shard * size : (shard + 1) * size]), epochs)
