"""Forward passes over response positions."""

from torch import Tensor, nn

from stages.ppo.batching import MicroBatch
from stages.ppo.losses import token_log_probs


def response_logits(model: nn.Module, batch: MicroBatch, temperature: float) -> Tensor:
    """Tempered logits [B, R, V] of each response token, in fp32. Padding columns carry no meaning."""
    logits: Tensor = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        # The logits that predict the response start one position before it.
        logits_to_keep=batch.num_response_columns + 1,
        use_cache=False,
    ).logits[:, :-1]
    return logits.float() / temperature


def response_log_probs(model: nn.Module, batch: MicroBatch, temperature: float) -> Tensor:
    """Log-probability [B, R] of each response token."""
    return token_log_probs(response_logits(model, batch, temperature), batch.response_tokens)


def response_values(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The critic's value of the state before each response token; [B, R], in fp32."""
    logits = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
    ).logits
    return logits[:, -batch.num_response_columns - 1 : -1, 0].float()


def scatter_rows(target: Tensor, batch: MicroBatch, values: Tensor) -> None:
    """Write a micro-batch's [B, R] values into the rows of a [N, T] matrix; a dummy's are left out."""
    if batch.is_dummy:  # another rank has the row
        return
    target[batch.rows.cpu(), : values.shape[1]] = values.detach().cpu()


def gather_rows(source: Tensor, batch: MicroBatch) -> Tensor:
    """The micro-batch's rows [B, R] of a [N, T] matrix."""
    return source[batch.rows.cpu(), : batch.num_response_columns].to(batch.input_ids.device)
