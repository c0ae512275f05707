"""The loss that keeps the experts of a mixture equally busy (Switch Transformer, arXiv 2101.03961, equations
4 to 6), as transformers' ``load_balancing_loss_func`` takes it: over the tokens of all layers together."""

from collections.abc import Sequence

import torch
from torch import Tensor


def balance_loss(logits: Sequence[Tensor], is_real: Tensor, top_k: int) -> Tensor:
    """Compute E times the sum, over E experts, of the assignments that each got per token and the mean of its
    probability: top_k if all are equally busy. Only the probabilities have a gradient.

    Args:
        logits: of each layer's router, [B x L, E], or [B, L, E].
        is_real: [B, L] which tokens are no padding.
        top_k: experts that each token goes through.
    """
    kept = is_real.flatten()
    counted: Tensor | float = 0.0
    likely: Tensor | float = 0.0
    for layer in logits:
        found = layer.flatten(0, -2)[kept].float().softmax(dim=-1)
        chosen = found.detach().topk(top_k, dim=-1).indices
        counted = counted + torch.zeros_like(found).scatter_(1, chosen, 1.0).sum(dim=0)
        likely = likely + found.sum(dim=0)
    tokens = len(logits) * kept.sum()
    return logits[0].shape[-1] * torch.sum((counted / tokens) * (likely / tokens))
