"""Forward passes over response positions. Results are [B, R], whatever the micro-batch's layout, and 0 where
there is no response token.
"""

import torch
from torch import Tensor, nn

from stages.context import UserError
from stages.ppo.batching import MicroBatch, Row, collate
from stages.ppo.logprobs import TokenOutputs, token_outputs

_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 0.05


def policy_outputs(
    model: nn.Module, batch: MicroBatch, temperature: float, entropy: bool, entropy_grad: bool = False
) -> TokenOutputs:
    """Compute the log-probability of each response token under the tempered distribution, and its entropy;
    [B, R] each.

    Args:
        entropy: whether to compute it.
        entropy_grad: whether it has a gradient.
    """
    length = batch.input_ids.shape[1]
    if batch.is_packed:
        kept: int | Tensor = batch.predictors
        positions = torch.arange(len(batch.predictors), device=batch.predictors.device)
    else:
        kept = length - batch.first_predictor
        line = batch.predictors // length
        positions = batch.predictors - (line + 1) * batch.first_predictor
    logits = model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, logits_to_keep=kept, use_cache=False
    ).logits
    log_probs, entropies = token_outputs(
        logits.flatten(0, 1), positions, batch.tokens, temperature, entropy, entropy_grad
    )
    return TokenOutputs(_by_row(batch, log_probs), None if entropies is None else _by_row(batch, entropies))


def response_log_probs(model: nn.Module, batch: MicroBatch, temperature: float) -> Tensor:
    """Compute the log-probability [B, R] of each response token."""
    return policy_outputs(model, batch, temperature, entropy=False).log_probs


def response_values(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Compute the critic's value of the state before each response token; [B, R], in fp32."""
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    return _by_row(batch, logits[..., 0].flatten()[batch.predictors].float())


def _by_row(batch: MicroBatch, values: Tensor) -> Tensor:
    """Scatter values [n] into a matrix [B, R]."""
    shape = len(batch.rows), batch.num_response_columns
    return values.new_zeros(shape).flatten().index_put((batch.cells,), values).view(shape)


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
    tolerance = _TOLERANCE.get(next(model.parameters()).dtype, _HALF_TOLERANCE)
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
    """Return the micro-batch's rows [B, R] of a [N, T] matrix on the same device."""
    return source[batch.rows, : batch.num_response_columns]
