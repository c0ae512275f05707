"""Micro-batches of token rows under a token budget, in one of three layouts, dealt evenly over ranks.

Padded: one line per row, tokens from the left, padding on the right. Causal attention never looks to the
right, so no attention mask is needed, and only the total lengths decide how much is padding.

Packed: all rows end to end in one line, with positions that start again at 0, which is how transformers
tells them apart when there is no attention mask. There is no padding.

Shared: responses to one prompt in one line, behind that prompt, which is computed once. A mask keeps the
responses from seeing each other. Each begins with the prompt's last token, so that every response token has a
position of its own that predicts it. Lines are padded as rows are.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stages.models.passes import count_pass

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Ids of a text: what Arrow gives without a copy, or a list."""


@dataclass(frozen=True)
class Row:
    """One sequence. The prompt has at least one token: its last one predicts the first of the response."""

    prompt: Tokens
    response: Tokens

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of some rows. B rows, L columns, R longest response, n response tokens of all rows together."""

    rows: Tensor
    """[B] indices of the rows in the whole batch."""
    input_ids: Tensor
    """[B, L]; packed: [1, L]; shared: [lines, L]."""
    position_ids: Tensor
    """Positions, of the same shape, counted from each row's first token."""
    predictors: Tensor
    """[n] where in the flat ``input_ids`` the token before each response token is."""
    cells: Tensor
    """[n] where in a flat [B, R] matrix each response token belongs."""
    num_response_columns: int
    """R, at least 1."""
    first_predictor: int
    """The first column whose prediction is wanted."""
    is_real: Tensor
    """Whether a token is no padding, of the shape of ``input_ids``."""
    num_tokens: int
    """Tokens without padding; of a shared prompt once."""
    is_packed: bool
    is_dummy: bool = False
    """Whether it counts for nothing, and goes through the model only because other ranks have more."""
    sees: Tensor | None = None
    """[lines, 1, L, L] whether a position sees another; None: those before it, in its sequence."""

    @property
    def tokens(self) -> Tensor:
        """[n] the response tokens."""
        return self.input_ids.flatten()[self.predictors + 1]

    def count_pass(self) -> None:
        """Count it as gone through a model; a dummy's tokens are padding."""
        count_pass(0 if self.is_dummy else self.num_tokens, self.input_ids.numel())

    def to(self, device: torch.device) -> "MicroBatch":
        return replace(self, **tensors_on(device, self))


def tensors_on(device: torch.device, holder: object) -> dict[str, Any]:
    """Return an object's fields that are tensors, moved to a device."""
    return {name: value.to(device) for name, value in vars(holder).items() if isinstance(value, Tensor)}


# splitting and dealing


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


# tensors


def micro_batches(
    rows: Sequence[Row],
    indices: Sequence[int],
    token_budget: int,
    packed: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
    num_shares: int | None = None,
    shared: bool = False,
) -> list[MicroBatch]:
    """Return one rank's micro-batches of a mini-batch: equally many on every rank, since each pass through
    the model is one of all ranks together. A rank with fewer rows makes up for it with dummies.

    Args:
        num_shares: shares that the rows are dealt to before each is split; by default one for each rank.
            Micro-batches are the same, whatever the number of ranks, where the number of shares is.
        shared: whether rows with one prompt may share a line. A line is then dealt as one row.
    """
    if not indices:
        return []
    lengths, lines = [row.length for row in rows], {i: [i] for i in indices}
    if shared:
        lines = shared_lines(rows, indices, token_budget)
        indices = list(lines)
        for first, line in lines.items():
            lengths[first] = line_length(rows, line)
    shares = deal_rows(lengths, indices, num_shares or num_ranks)
    number = max(len(split(lengths, share, token_budget, packed)) for share in shares)
    places = [divmod(i, len(shares)) for i in range(rank, number * len(shares), num_ranks)]
    of_share = {
        share: _largest_first(lengths, split_into(lengths, shares[share], token_budget, number, packed))
        for share in {share for _, share in places}
    }
    own = [batch for place, share in places for batch in of_share[share][place : place + 1]]
    shortest = min(indices, key=lambda i: (lengths[i], i))
    missing = -(-number * len(shares) // num_ranks) - len(own)

    def collated(firsts: Sequence[int]) -> MicroBatch:
        if all(len(lines[first]) == 1 for first in firsts):
            return collate(rows, firsts, packed)
        return collate_shared(rows, [lines[first] for first in firsts])

    dummies = missing * [replace(collated([shortest]), is_dummy=True)]
    return [collated(batch) for batch in own] + dummies


def _largest_first(lengths: Sequence[int], batches: list[list[int]]) -> list[list[int]]:
    """Sort batches: if memory does not suffice for the largest, that shows at once."""
    return sorted(batches, key=lambda batch: -max(lengths[i] for i in batch))


def collate(rows: Sequence[Row], indices: Sequence[int], packed: bool = False) -> MicroBatch:
    """Put the given rows into one micro-batch. The padding id is 0."""
    chosen = [rows[i] for i in indices]
    assert all(len(row.prompt) for row in chosen), (
        "nothing predicts the first token of a row without a prompt"
    )
    lines = [torch.cat([_ids(row.prompt), _ids(row.response)]) for row in chosen]
    counts = [torch.arange(len(line)) for line in lines]
    longest = max(row.length for row in chosen)
    if packed:
        input_ids, position_ids = torch.cat(lines)[None], torch.cat(counts)[None]
        starts = [0, *torch.tensor([row.length for row in chosen]).cumsum(0).tolist()]
        is_real = torch.ones_like(input_ids, dtype=torch.bool)
    else:
        input_ids = torch.nn.utils.rnn.pad_sequence(lines, batch_first=True)
        position_ids = torch.arange(longest).repeat(len(chosen), 1)
        starts = [longest * i for i in range(len(chosen))]
        is_real = position_ids < torch.tensor([[row.length] for row in chosen])
    width = max(1, *(len(row.response) for row in chosen))
    places = list(zip(starts, chosen, strict=False))
    predictors = [start + len(row.prompt) - 1 + torch.arange(len(row.response)) for start, row in places]
    cells = [width * i + torch.arange(len(row.response)) for i, row in enumerate(chosen)]
    return MicroBatch(
        rows=torch.tensor(list(indices)),
        input_ids=input_ids,
        position_ids=position_ids,
        predictors=torch.cat(predictors),
        cells=torch.cat(cells),
        num_response_columns=width,
        first_predictor=min(len(row.prompt) for row in chosen) - 1,
        is_real=is_real,
        num_tokens=sum(row.length for row in chosen),
        is_packed=packed,
    )


def _ids(tokens: Tokens) -> Tensor:
    return torch.as_tensor(tokens, dtype=torch.long)


# one prompt, several responses

_TOKENS_OF_A_PASS = 3072
"""Length of a sequence whose attention costs as much as everything else that a model does with it: six times
the width of its hidden states, here of a narrow model (512), so that a wide one shares less than it could."""


def shared_lines(rows: Sequence[Row], indices: Iterable[int], token_budget: int) -> dict[int, list[int]]:
    """Put rows with one prompt into lines, of at most ``token_budget`` tokens, while that makes them cheaper:
    the attention of a line also computes, and masks, what one response would see of another.

    Returns:
        The rows of each line by the first of them.
    """
    by_prompt: dict[bytes, list[int]] = {}
    for i in sorted(indices, key=lambda i: (rows[i].length, i)):
        by_prompt.setdefault(np.asarray(rows[i].prompt, np.int64).tobytes(), []).append(i)
    lines: dict[int, list[int]] = {}
    for group in by_prompt.values():
        line: list[int] = []
        for i in group:
            wider = line_length(rows, [*line, i])
            apart = _cost(line_length(rows, line)) + _cost(rows[i].length)
            if not line or wider > token_budget or _cost(wider) > apart:
                line = []
                lines[i] = line
            line.append(i)
    return lines


def line_length(rows: Sequence[Row], line: Sequence[int]) -> int:
    """Return the tokens of a line: a row of its own as it is, more with the prompt once."""
    if len(line) <= 1:
        return sum(rows[i].length for i in line)
    return len(rows[line[0]].prompt) - 1 + sum(1 + len(rows[i].response) for i in line)


def _cost(length: int) -> int:
    return length * (length + _TOKENS_OF_A_PASS)


def collate_shared(rows: Sequence[Row], lines: Sequence[Sequence[int]]) -> MicroBatch:
    """Put the rows of the given lines into one micro-batch. The padding id is 0."""
    ids: list[Tensor] = []
    places: list[Tensor] = []
    parts: list[Tensor] = []
    starts: list[tuple[int, int]] = []
    for number, line in enumerate(lines):
        prompt = _ids(rows[line[0]].prompt)
        before, last = prompt[:-1], prompt[-1:]
        answers = [torch.cat([last, _ids(rows[i].response)]) for i in line]
        sizes = [len(answer) for answer in answers]
        ids.append(torch.cat([before, *answers]))
        places.append(torch.cat([torch.arange(len(before)), *(len(before) + torch.arange(n) for n in sizes)]))
        of_answers = torch.arange(1, 1 + len(line)).repeat_interleave(torch.tensor(sizes))
        parts.append(torch.cat([torch.zeros(len(before), dtype=torch.long), of_answers]))
        starts += [(number, len(before) + sum(sizes[:k])) for k in range(len(line))]
    chosen = [rows[i] for line in lines for i in line]
    input_ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    part_of = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=-1)
    longest, width = input_ids.shape[1], max(1, *(len(row.response) for row in chosen))
    answered = [
        (longest * line + column, len(row.response))
        for (line, column), row in zip(starts, chosen, strict=True)
    ]
    return MicroBatch(
        rows=torch.tensor([i for line in lines for i in line]),
        input_ids=input_ids,
        position_ids=torch.nn.utils.rnn.pad_sequence(places, batch_first=True),
        predictors=torch.cat([start + torch.arange(length) for start, length in answered]),
        cells=torch.cat([width * k + torch.arange(length) for k, (_, length) in enumerate(answered)]),
        num_response_columns=width,
        first_predictor=min(len(row.prompt) for row in chosen) - 1,
        is_real=part_of >= 0,
        num_tokens=sum(map(len, ids)),
        is_packed=False,
        sees=_seen(part_of),
    )


def _seen(parts: Tensor) -> Tensor:
    """Return the mask [B, 1, L, L] of lines whose positions are of parts [B, L]: of the prompt, 0, of a
    response, or of padding, -1, which sees what is before it in its line."""
    length = parts.shape[1]
    is_before = torch.ones(length, length, dtype=torch.bool).tril()
    same = parts[:, :, None] == parts[:, None, :]
    return ((same | (parts == 0)[:, None, :]) & is_before)[:, None]
