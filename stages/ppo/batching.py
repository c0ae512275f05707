"""Micro-batches of token rows under a token budget, in one of three layouts, dealt evenly over ranks.

Padded: one line per row, tokens from the left, padding on the right. Causal attention never looks to the
right, so no attention mask is needed, and only the total lengths decide how much is padding.

Packed: all rows end to end in one line, with positions that start again at 0, which is how transformers
tells them apart when there is no attention mask. There is no padding.

Shared: responses to one prompt in one line, behind that prompt, which is computed once. A mask keeps the
responses from seeing each other. Each begins with the prompt's last token, so that every response token has a
position of its own that predicts it. Lines are padded as rows are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stages.files.routes import Routes
from stages.models.passes import count_pass
from stages.ppo.splitting import deal_rows, split, split_into

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Ids of a text: what Arrow gives without a copy, or a list."""


@dataclass(frozen=True)
class Row:
    """One sequence. The prompt has at least one token: its last one predicts the first of the response."""

    prompt: Tokens
    response: Tokens
    routes: Routes | None = None
    """[length - 1, layers x top_k] experts that each token but the last goes through; None: as routers
    choose."""

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
    routes: Tensor | None = None
    """[B, L, layers x top_k] experts of each token, -1 where routers choose; packed and shared as
    ``input_ids``. None: routers choose all."""

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
        input_ids = pad_sequence(lines, batch_first=True)
        position_ids = torch.arange(longest).repeat(len(chosen), 1)
        starts = [longest * i for i in range(len(chosen))]
        is_real = position_ids < torch.tensor([[row.length] for row in chosen])
    width, routes = max(1, *(len(row.response) for row in chosen)), None
    if all(row.routes is not None for row in chosen):
        routed = [_routed(row) for row in chosen]
        routes = torch.cat(routed)[None] if packed else pad_sequence(routed, True, -1)
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
        routes=routes,
    )


def _ids(tokens: Tokens) -> Tensor:
    return torch.as_tensor(tokens, dtype=torch.long)


def _routed(row: Row, start: int = 0) -> Tensor:
    """Return the experts of a row's tokens from ``start`` on, [length - start, layers x top_k]."""
    assert row.routes is not None
    known = torch.from_numpy(row.routes[start:].astype(np.int16))
    return torch.nn.functional.pad(known, (0, 0, 0, 1), value=-1)


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
        by_prompt.setdefault(_read_alike(rows[i]), []).append(i)
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


def _read_alike(row: Row) -> bytes:
    """Return what rows have in common whose prompts go through a model once: also the prompt's experts."""
    routes = b"" if row.routes is None else row.routes[: len(row.prompt) - 1].tobytes()
    return np.asarray(row.prompt, np.int64).tobytes() + routes


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
    input_ids = pad_sequence(ids, batch_first=True)
    part_of = pad_sequence(parts, batch_first=True, padding_value=-1)
    longest, width = input_ids.shape[1], max(1, *(len(row.response) for row in chosen))
    answered = [
        (longest * line + column, len(row.response))
        for (line, column), row in zip(starts, chosen, strict=True)
    ]
    return MicroBatch(
        rows=torch.tensor([i for line in lines for i in line]),
        input_ids=input_ids,
        position_ids=pad_sequence(places, batch_first=True),
        predictors=torch.cat([start + torch.arange(length) for start, length in answered]),
        cells=torch.cat([width * k + torch.arange(length) for k, (_, length) in enumerate(answered)]),
        num_response_columns=width,
        first_predictor=min(len(row.prompt) for row in chosen) - 1,
        is_real=part_of >= 0,
        num_tokens=sum(map(len, ids)),
        is_packed=False,
        sees=_seen(part_of),
        routes=_routed_lines(rows, lines),
    )


def _routed_lines(rows: Sequence[Row], lines: Sequence[Sequence[int]]) -> Tensor | None:
    """Return the experts of the tokens of shared lines; None where rows have none."""
    found = []
    for line in lines:
        first, last = rows[line[0]].routes, len(rows[line[0]].prompt) - 1
        if first is None:
            return None
        before = torch.from_numpy(first[:last].astype(np.int16))
        found.append(torch.cat([before, *(_routed(rows[i], last) for i in line)]))
    return pad_sequence(found, True, -1)


def _seen(parts: Tensor) -> Tensor:
    """Return the mask [B, 1, L, L] of lines whose positions are of parts [B, L]: of the prompt, 0, of a
    response, or of padding, -1, which sees what is before it in its line."""
    length = parts.shape[1]
    is_before = torch.ones(length, length, dtype=torch.bool).tril()
    same = parts[:, :, None] == parts[:, None, :]
    return ((same | (parts == 0)[:, None, :]) & is_before)[:, None]
