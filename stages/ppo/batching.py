"""Rows of tokens to padded tensors: length-sorted micro-batches under a token budget.

Layout of a micro-batch: prompts are padded on the left and responses on the right, so that every response
starts in the same column and the model's last layer runs on response positions only.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One sequence."""

    prompt: Sequence[int]
    response: Sequence[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of some rows. B rows, P longest prompt, R longest response."""

    rows: Tensor
    """[B] indices of the rows in the whole batch."""
    input_ids: Tensor
    """[B, P + R]."""
    attention_mask: Tensor
    """[B, P + R] int64, 1 at tokens."""
    position_ids: Tensor
    """[B, P + R], counted from each row's first token."""
    num_response_columns: int
    """R."""
    is_dummy: bool = False
    """Counts nothing: it goes through the model only because other ranks have one micro-batch more."""

    @property
    def response_tokens(self) -> Tensor:
        """[B, R]."""
        return self.input_ids[:, -self.num_response_columns :]

    def to(self, device: torch.device) -> "MicroBatch":
        return replace(
            self,
            rows=self.rows.to(device),
            input_ids=self.input_ids.to(device),
            attention_mask=self.attention_mask.to(device),
            position_ids=self.position_ids.to(device),
        )


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


def micro_batches(rows: Sequence[Row], indices: Sequence[int], token_budget: int) -> list[MicroBatch]:
    """Length-sorted micro-batches of the given rows."""
    lengths = [(len(row.prompt), len(row.response)) for row in rows]
    return [collate(rows, batch) for batch in budgeted(lengths, indices, token_budget)]


def deal_rows(lengths: Sequence[int], indices: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Share ``indices`` out so that ranks have about equally many tokens: the longest first, each to the rank
    with the fewest tokens so far. No rank has more than another by more than its shortest row.

    Args:
        lengths: tokens of every row.
        indices: rows to deal, indices into ``lengths``.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, 0, rank) for rank in range(num_ranks)]  # tokens, rows, rank
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        tokens, count, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (tokens + lengths[index], count + 1, rank))
    return shares


def micro_batches_of_rank(
    rows: Sequence[Row], indices: Sequence[int], token_budget: int, rank: int, num_ranks: int
) -> list[MicroBatch]:
    """One rank's micro-batches of a mini-batch: equally many on every rank, since each pass through the model
    is one of all ranks together. Ranks that have fewer make up for it with dummies, of the shortest row.
    """
    shares = deal_rows([row.length for row in rows], indices, num_ranks)
    lengths = [(len(row.prompt), len(row.response)) for row in rows]
    numbers = [len(budgeted(lengths, share, token_budget)) for share in shares]
    own = micro_batches(rows, shares[rank], token_budget)
    shortest = min(indices, key=lambda i: (rows[i].length, i))
    dummies = max(numbers) - len(own)
    return own + dummies * [replace(collate(rows, [shortest]), is_dummy=True)]


def collate(rows: Sequence[Row], indices: Sequence[int]) -> MicroBatch:
    """Pad the given rows into one micro-batch. The padding id is 0; the mask hides it."""
    chosen = [rows[i] for i in indices]
    num_left = max(len(row.prompt) for row in chosen)
    num_right = max(len(row.response) for row in chosen)
    input_ids = torch.zeros(len(chosen), num_left + num_right, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for i, row in enumerate(chosen):
        start = num_left - len(row.prompt)
        stop = num_left + len(row.response)
        input_ids[i, start:stop] = torch.as_tensor([*row.prompt, *row.response])
        attention_mask[i, start:stop] = 1
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    return MicroBatch(torch.tensor(list(indices)), input_ids, attention_mask, position_ids, num_right)
