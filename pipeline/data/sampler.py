"""Dealing of prompts to iterations and their shards."""

from dataclasses import dataclass

import numpy as np

from pipeline.run.seeds import derive_seed


@dataclass(frozen=True)
class Deal:
    """The prompts of one shard of one iteration: 0-based ``epoch``, and ``indices`` into the usable rows."""

    epoch: int
    indices: tuple[int, ...]


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
