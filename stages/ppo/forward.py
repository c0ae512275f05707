"""Forward passes over response positions. Results are [B, R], whatever the micro-batch's layout, and 0 where
there is no response token."""

from typing import Any

import torch
from torch import Tensor, nn

from stages.context import UserError
from stages.ppo.batching import MicroBatch, Row, collate
from stages.ppo.head import HALF_TOLERANCE, TOLERANCE, head_of
from stages.ppo.logits import AskedTokens, TokenOutputs, token_outputs
from stages.ppo.routers import silenced


def policy_outputs(
    model: nn.Module,
    batch: MicroBatch,
    temperature: float,
    entropy: bool,
    entropy_grad: bool = False,
    others: Tensor | None = None,
    top: int = 0,
) -> TokenOutputs:
    """Compute the log-probability of each response token under the tempered distribution, and its entropy;
    [B, R] each.

    Args:
        entropy: whether to compute it.
        entropy_grad: whether it has a gradient.
        others: [B, R, k] further ids for each token's place, whose log-probabilities are wanted too.
        top: number of the most probable ids for each token's place that are wanted, in place of others.
    """
    length = batch.input_ids.shape[1]
    if batch.is_packed:
        kept: int | Tensor = batch.predictors
        positions = torch.arange(len(batch.predictors), device=batch.predictors.device)
    else:
        kept = length - batch.first_predictor
        line = batch.predictors // length
        positions = batch.predictors - (line + 1) * batch.first_predictor
    further = None if others is None else others.flatten(0, 1)[batch.cells].long()
    asked = AskedTokens(positions, batch.tokens, temperature, entropy, entropy_grad, further, top)
    places = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    given = {**places, **seen_in(model, batch), "logits_to_keep": kept, "use_cache": False}
    if head := head_of(model, **places):
        found = head.outputs(model, given, asked)
    else:
        found = token_outputs(model(**given).logits.flatten(0, 1), asked)
    by_row = [None if one is None else _by_row(batch, one) for one in found[1:]]
    return TokenOutputs(_by_row(batch, found.log_probs), *by_row)


def response_log_probs(model: nn.Module, batch: MicroBatch, temperature: float) -> Tensor:
    """Compute the log-probability [B, R] of each response token."""
    return policy_outputs(model, batch, temperature, entropy=False).log_probs


def response_values(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Compute the critic's value of the state before each response token; [B, R], in fp32."""
    places = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, **seen_in(model, batch)}
    logits = model(**places, use_cache=False).logits
    return _by_row(batch, logits[..., 0].flatten()[batch.predictors].float())


def seen_in(model: nn.Module, batch: MicroBatch) -> dict[str, Any]:
    """Return the mask of a micro-batch with shared prompts as a model takes it, added to attention's scores;
    no mask for other layouts, whose mask is the model's own. A mixture of experts computes no loss."""
    if batch.sees is None:
        return silenced(model)
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(batch.sees.shape, dtype=dtype, device=batch.sees.device)
    return {"attention_mask": mask.masked_fill_(~batch.sees, torch.finfo(dtype).min), **silenced(model)}


def _by_row(batch: MicroBatch, values: Tensor) -> Tensor:
    """Scatter values [n, ...] into a matrix [B, R, ...]."""
    shape = len(batch.rows), batch.num_response_columns, *values.shape[1:]
    return values.new_zeros(shape).flatten(0, 1).index_put((batch.cells,), values).view(shape)


_MOST_MASKED = 8192
"""Most tokens of a packed micro-batch whose attention is masked: a mask of 64 MiB, and pairs of tokens of
different sequences that cost as much as the rest of a layer of a small model."""
_MASKED = ("eager", "sdpa")
"""Attention that computes every pair of tokens of a packed micro-batch, and masks most of them."""


def packing_problem(attention: str | None, budget: int, is_gpu: bool) -> str:
    """Return why sequences laid end to end would cost more than padding; empty if they would not. On CPUs
    they always do, and may all the same: tests compare both layouts there. Pure.

    Args:
        attention: the model's implementation.
        budget: tokens of a micro-batch.
    """
    if not is_gpu or attention not in _MASKED or budget <= _MOST_MASKED:
        return ""
    return (
        f"update.remove_padding=true: {attention} attention computes all {budget:,} x {budget:,} pairs of a "
        "micro-batch's tokens, also of different sequences, under a mask of that size; set "
        "update.attention=flash_attention_2 (or flex_attention), leave update.remove_padding out, or give "
        f"update.tokens_per_micro_batch={_MOST_MASKED} or less"
    )


@torch.no_grad()
def check_packing(model: nn.Module, rows: tuple[Row, Row], device: torch.device) -> None:
    """Compare the model's log-probabilities of two packed rows with those of the same rows padded.

    A model that does not tell rows apart by their positions, because of its attention or because it is
    recurrent, would let each row see those before it. Every rank must call this.

    Raises:
        UserError: the numbers are not the same.
    """
    packed = response_log_probs(model, collate(rows, [0, 1], packed=True).to(device), temperature=1.0)
    padded = response_log_probs(model, collate(rows, [0, 1]).to(device), temperature=1.0)
    error = float((packed - padded).abs().sum()) / max(1, sum(len(row.response) for row in rows))
    tolerance = TOLERANCE.get(next(model.parameters()).dtype, HALF_TOLERANCE)
    if not error <= tolerance:
        raise UserError(
            f"log-probabilities of sequences laid end to end are off by {error:.3g} per token: this model or "
            "its attention implementation does not keep them apart; set update.remove_padding=false"
        )


def scatter_rows(target: Tensor, batch: MicroBatch, values: Tensor) -> None:
    """Write a micro-batch's [B, R] values into the rows of a [N, T] matrix; a dummy's are left out."""
    if batch.is_dummy:  # another rank has the row
        return
    target[batch.rows, : values.shape[1]] = values.detach().to(target.dtype)


def gather_rows(source: Tensor, batch: MicroBatch) -> Tensor:
    """Return the micro-batch's rows [B, R] of a [N, T] matrix, on the micro-batch's device."""
    rows = source[batch.rows.to(source.device), : batch.num_response_columns]
    return rows.to(batch.rows.device)
