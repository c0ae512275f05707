"""The KL to teachers as a term of the policy loss, token by token (algorithm.distillation.placement=loss)."""

import torch
from torch import Tensor

from pipeline.config.algorithm import DistillationConfig
from stages.ppo.batching import MicroBatch
from stages.ppo.forward import gather_rows
from stages.ppo.logits import TokenOutputs
from stages.ppo.math.kl import kl_loss_per_token, top_kl
from stages.ppo.targets import Targets


def asked_of(targets: Targets, batch: MicroBatch) -> Tensor | None:
    """Return the ids [B, R, k] whose log-probabilities the policy has to give; None where it is not asked."""
    return None if targets.teacher_top_tokens is None else gather_rows(targets.teacher_top_tokens, batch)


def teacher_loss(
    given: DistillationConfig, targets: Targets, batch: MicroBatch, outputs: TokenOutputs
) -> Tensor:
    """Compute KL(policy || teacher) times its weight, of each token of a micro-batch, [B, R]; 0 for responses
    without a teacher."""
    assert targets.teacher_log_probs is not None
    assert targets.teacher_weights is not None
    weights = targets.teacher_weights[batch.rows]
    # Another model computed them: in the backward pass 0 times NaN is NaN.
    is_taught = gather_rows(targets.mask, batch) & (weights > 0)
    if targets.teacher_top_log_probs is not None:
        assert outputs.others is not None, "they were asked for"
        theirs = gather_rows(targets.teacher_top_log_probs, batch)
        chosen = is_taught.unsqueeze(2)
        # The policy's own where there is no teacher: a KL of 0, with a gradient of 0.
        mine = torch.where(chosen, outputs.others, outputs.others.detach())
        return weights * top_kl(mine, torch.where(chosen, theirs, outputs.others.detach()))
    log_probs, theirs = outputs.log_probs, gather_rows(targets.teacher_log_probs, batch)
    teacher = torch.where(is_taught, theirs, log_probs.detach())
    return weights * kl_loss_per_token(log_probs, teacher, given.per_token, given.straight_through)
