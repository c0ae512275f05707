"""Adapters that change a tiny policy, without training it."""

from pathlib import Path

import torch

from pipeline.config.update import LoraConfig, Precision
from stages.models.loading import load_causal_lm
from stages.ppo.lora import attach, save_adapter


def make_adapter(base: Path, folder: Path, rank: int = 4, seed: int = 0) -> Path:
    """Write an adapter of all linear layers of the model in ``base``, of random numbers."""
    model = load_causal_lm(base, Precision.FP32, trust_remote_code=False)
    attach(model, base, LoraConfig(rank=rank, alpha=8.0), seed=0)
    factors = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    torch.manual_seed(seed)
    for weight in factors.values():
        torch.nn.init.normal_(weight, std=0.2)
    save_adapter(model, {name: weight.detach() for name, weight in factors.items()}, folder)
    return folder
