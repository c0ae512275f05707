"""Rows dealt evenly over ranks, and split into micro-batches under a token budget, by their lengths alone."""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


def budgeted(
    lengths: Sequence[tuple[int, int]], indices: Sequence[int], token_budget: int
) -> list[list[int]]:
    """Split ``indices`` into batches of similar length whose padded size stays within the budget.

    Args:
        lengths: (left, right) of every row; a batch is padded to the longest of each.
        indices: rows to split, indices into ``lengths``.
        token_budget: rows x (longest left + longest right) of a batch; a single row may exceed it.
    """
    order = sorted(indices, key=lambda i: (sum(lengths[i]), lengths[i], i))
    batches: list[list[int]] = []
    left = right = 0
    for index in order:
        wider = max(left, lengths[index][0]), max(right, lengths[index][1])
        if not batches or (len(batches[-1]) + 1) * sum(wider) > token_budget:
            batches.append([])
            wider = lengths[index]
        left, right = wider
        batches[-1].append(index)
    return batches


@dataclass(frozen=True)
class _Share:
    tokens: int
    rows: tuple[int, ...]


def deal_rows(lengths: Sequence[int], indices: Iterable[int], num_shares: int) -> list[list[int]]:
    """Share ``indices`` out so that all shares have about equally many tokens (largest differencing method:
    Karmarkar and Karp 1982, for many shares Michiels et al. 2003). Two never differ by more than the
    longest row.

    Partial deals, of one row each at first, are merged two by two, those first whose shares differ most:
    the largest share of one is put together with the smallest of the other.

    Args:
        lengths: tokens of every row.
        indices: rows to deal, indices into ``lengths``.
    """
    # A deal is its shares from the largest to the smallest, without those that have no tokens yet.
    order = sorted(indices, key=lambda i: (-lengths[i], i))
    deals = [(-lengths[i], number, [_Share(lengths[i], (i,))]) for number, i in enumerate(order)]
    heapq.heapify(deals)
    while len(deals) > 1:
        (_, number, one), (_, _, other) = heapq.heappop(deals), heapq.heappop(deals)
        shares = _merge(one, other, num_shares)
        smallest = shares[-1].tokens if len(shares) == num_shares else 0
        heapq.heappush(deals, (smallest - shares[0].tokens, number, shares))
    dealt = [list(share.rows) for _, _, shares in deals for share in shares]
    return dealt + [[] for _ in range(num_shares - len(dealt))]


def _merge(one: list[_Share], other: list[_Share], num_shares: int) -> list[_Share]:
    """Merge two deals: share i of the one with share num_shares - 1 - i of the other."""
    untouched = one[: num_shares - len(other)]
    smallest = one[num_shares - len(other) :]
    facing = other[::-1]
    together = [_Share(a.tokens + b.tokens, a.rows + b.rows) for a, b in zip(smallest, facing, strict=False)]
    shares = untouched + together + facing[len(smallest) :]
    return sorted(shares, key=lambda share: -share.tokens)


def split(lengths: Sequence[int], indices: Sequence[int], token_budget: int, packed: bool) -> list[list[int]]:
    """Split ``indices`` into as few batches as the budget allows.

    Args:
        lengths: tokens of every row.
        indices: rows to split, indices into ``lengths``.
        token_budget: tokens of a batch, padding included; a single row may exceed it.
    """
    if not packed:
        return budgeted([(0, length) for length in lengths], indices, token_budget)
    at_least = -(-sum(lengths[i] for i in indices) // token_budget)

    def fits(num_batches: int) -> bool:
        batches = deal_rows(lengths, indices, num_batches)
        return all(len(batch) == 1 or sum(lengths[i] for i in batch) <= token_budget for batch in batches)

    if not indices:
        return []
    return deal_rows(lengths, indices, _smallest(at_least, len(indices), fits))


def split_into(
    lengths: Sequence[int], indices: Sequence[int], token_budget: int, num_batches: int, packed: bool
) -> list[list[int]]:
    """Split ``indices`` into ``num_batches`` batches within the budget, of about equal size; fewer only if
    there are fewer rows.

    Args:
        num_batches: at least as many as :func:`split` makes.
    """
    if packed:
        return [batch for batch in deal_rows(lengths, indices, num_batches) if batch]

    def fits(budget: int) -> bool:
        return len(split(lengths, indices, budget, packed=False)) <= num_batches

    batches = split(lengths, indices, _smallest(1, token_budget, fits), packed=False)
    while len(batches) < min(num_batches, len(indices)):
        largest = batches.pop(max(range(len(batches)), key=lambda i: len(batches[i])))
        half = len(largest) // 2
        batches += [largest[:half], largest[half:]]
    return batches


def _smallest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Find the smallest number from ``low`` to ``high`` that fits, by exponential and then binary search. All
    larger ones must fit too."""
    step = 1
    while low + step <= high and not fits(low + step - 1):  # it is expected to be near ``low``
        low, step = low + step, 2 * step
    return min(high, low + bisect_left(range(low, min(high, low + step - 1)), True, key=fits))
