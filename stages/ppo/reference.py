"""The frozen reference's log-probabilities, computed by the update when the reward stage has not."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.config.algorithm import ReferenceStage
from pipeline.config.engine_rules import has_reference_in
from pipeline.config.update import Precision, UpdateConfig
from stages.context import Context
from stages.models.adapters import merge_into, read_adapter
from stages.models.hidden import hide_unknown_ids
from stages.models.loading import DTYPES, load_causal_lm
from stages.ppo.bare import Bare, bare_model
from stages.ppo.experience import Experience
from stages.ppo.forward import response_log_probs
from stages.ppo.learner import per_token
from stages.ppo.minibatches import is_packed, split_epoch
from stages.ppo.sharing import can_share
from stages.ppo.training import say
from stages.ppo.zero import permit_fp16_on_cpu, share_out


def with_reference(context: Context, experience: Experience, iteration: int) -> Experience:
    """Return the experience with the reference's log-probabilities, if the update is to compute them.

    The model is freed before this returns, so that it is never in memory beside what is trained.
    """
    if not has_reference_in(context.config, ReferenceStage.UPDATE):
        return experience
    if is_policy(context, iteration):
        say("the reference is the policy that this iteration begins with, which computes the same numbers")
        return experience
    with reference_model(context, context.reference_of(iteration)) as model:
        found = reference_log_probs(context, model, experience, iteration)
    return replace(experience, reference_log_probs=found)


def is_policy(context: Context, iteration: int) -> bool:
    """Whether the reference is what the policy is before an iteration's first step, and the policy computes
    its log-probabilities over the very same micro-batches. A reference chooses experts of its own."""
    config = context.config
    if iteration > 1 or config.algorithm.shaping.filter_groups or config.algorithm.router_replay:
        return False
    given = context.source(config.model.reference or config.model.policy)
    return given.resolve() == context.policy_files(0).base.resolve()


@contextlib.contextmanager
def reference_model(context: Context, version: int) -> Iterator[nn.Module]:
    """Yield the reference of a version, and free it afterwards. Every rank takes part."""
    config, files = context.config, context.reference_files(version)
    update, trust = config.update, config.model.trust_remote_code

    def load(placement: str | None) -> PreTrainedModel:
        loaded = load_causal_lm(files.base, update.precision, trust, placement, update.attention)
        if (
            files.adapter is not None
        ):  # which is refused with ZeRO 3, where there are no weights to merge into
            merge_into(loaded, read_adapter(files.adapter))
        return hide_unknown_ids(loaded, config)

    model = load(None) if update.zero < 3 else shared_out(bare_model(load, files.base), update)
    yield model
    forget(model)


def reference_log_probs(
    context: Context, model: nn.Module, experience: Experience, iteration: int, num_shares: int | None = None
) -> Tensor:
    """Return the reference's log-probabilities of an iteration's responses, [N, T]. Every rank takes part.

    Args:
        num_shares: as of :func:`stages.ppo.batching.micro_batches`.
    """
    if not len(experience):
        return torch.zeros_like(experience.rollout_log_probs)
    # Over the policy's own micro-batches, unless groups are left out later: the same weights then give a
    # KL of exactly 0.
    several = context.config.rollout.samples_per_prompt > 1 and not is_packed(context.config.update)
    experience = replace(experience, shares_prompts=several and can_share(model))
    batches = split_epoch(context.config, experience, iteration, 0, num_shares)
    temperature = context.config.rollout.temperature
    with context.computing():
        return per_token(experience, batches, lambda batch: response_log_probs(model, batch, temperature))


def shared_out(bare: Bare, config: UpdateConfig) -> nn.Module:
    """Prepare a model for forward passes only, sharded over the ranks."""
    import deepspeed

    if config.precision is Precision.FP16:
        permit_fp16_on_cpu()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        str(config.precision): {"enabled": DTYPES[config.precision].itemsize < 4},
    }
    share_out(bare.model, settings, bare)
    engine, *_ = deepspeed.initialize(model=bare.model, config=settings, dist_init_required=False)
    engine.eval()
    return engine


def forget(model: nn.Module) -> None:
    """Free the weights: DeepSpeed holds on to the parameters of an engine even when nothing else does."""
    for parameter in model.parameters():
        for tensor in (parameter, getattr(parameter, "ds_tensor", parameter)):
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
