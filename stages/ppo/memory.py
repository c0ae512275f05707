"""Advice when memory does not suffice: which setting to change first, with the numbers of this run."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open

from pipeline.config.algorithm import Estimator
from pipeline.config.model_dir import text_settings
from pipeline.config.schema import Config
from pipeline.config.update import Precision, UpdateConfig
from stages import ranks
from stages.context import OutOfMemory
from stages.ppo.experience import Experience

_GIB = 2**30
_HOST_WORDS = ("can't allocate memory", "not enough memory")
"""Phrases in the errors that torch raises when the host has no memory left; it has no class for them."""


@dataclass(frozen=True)
class Shape:
    """A model's size."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int


@dataclass(frozen=True)
class Needs:
    """Memory that one rank needs for the policy, roughly, in bytes."""

    states: float
    """Weights, gradients and optimizer state."""
    activations: float
    """Activations of one micro-batch, logits included."""


def shape_of(directory: Path) -> Shape:
    """Read a model's size from its directory, without loading the model."""
    settings, parameters = text_settings(directory), 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            parameters += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - no dict
    names = (("num_hidden_layers", "n_layer"), ("hidden_size", "n_embd"), ("vocab_size",))
    return Shape(parameters, *(next((settings[n] for n in ns if n in settings), 0) for ns in names))


def needs_of(config: UpdateConfig, shape: Shape, micro_batch: int, num_ranks: int) -> Needs:
    """Estimate memory from the model's shape and the settings, for micro-batches of ``micro_batch`` tokens.

    Per weight: ZeRO, arXiv 1910.02054 section 3. Per token and layer: arXiv 2205.05198 section 4 without the
    attention matrix, which fused kernels do not keep.
    """
    width = 4 if config.precision is Precision.FP32 else 2
    parts = [(3, width)]  # ZeRO stage from which ranks share it, bytes per weight
    if config.lora is None:  # of adapters they are too few to count
        parts.append((2, 4))
        if not config.offload_optimizer:
            parts.append((1, 8 if width == 4 else 12))
    per_weight = sum(size / (num_ranks if config.zero_stage >= stage else 1) for stage, size in parts)
    per_layer = width if config.activation_checkpointing else 17 * width
    per_token = shape.layers * shape.hidden * per_layer + shape.vocabulary * (width + 3 * 4)
    return Needs(shape.parameters * per_weight, micro_batch * per_token)


def suggestions(config: UpdateConfig, needs: Needs, longest: int, num_ranks: int) -> list[str]:
    """Return settings to change, the most useful first. ``longest``: tokens of the longest sequence."""
    smaller_batch, smaller_states = [], []
    if (budget := config.tokens_per_micro_batch) > longest:
        half = max(longest, budget // 2)
        smaller_batch.append(f"update.tokens_per_micro_batch={half} (now {budget}; longest row {longest})")
    if not config.activation_checkpointing:
        smaller_batch.append("update.activation_checkpointing=true")
    if config.zero_stage < 3 and num_ranks > 1:
        next_stage = 3 if config.lora else config.zero_stage + 1
        smaller_states.append(f"update.zero_stage={next_stage} (now {config.zero_stage})")
    if not config.offload_optimizer and config.lora is None:
        smaller_states.append(f"update.offload_optimizer=true with zero_stage={max(1, config.zero_stage)}")
    smaller_states.append(f"more ranks (now {num_ranks}) with zero_stage=3")
    if config.lora is None:
        smaller_states.append("update.lora={}")
    if needs.activations >= needs.states:
        return smaller_batch + smaller_states
    return smaller_states + smaller_batch


def explain(config: Config, experience: Experience, num_ranks: int, has: float) -> str:
    """Say in one line what memory there is, what is needed, what to change. ``has``: bytes of memory."""
    update = config.update
    longest = max(row.length for row in experience.rows)
    micro_batch = max(update.tokens_per_micro_batch, longest)
    needs = needs_of(update, shape_of(Path(config.model.policy)), micro_batch, num_ranks)
    critic = ", and the critic as much again" if config.algorithm.estimator is Estimator.GAE else ""
    return (
        f"out of memory: a rank has {has / _GIB:.1f} GiB; the policy needs about {needs.states / _GIB:.2f} "
        f"GiB for weights, gradients and optimizer and {needs.activations / _GIB:.2f} GiB for a micro-batch "
        f"of {micro_batch} tokens{critic}. Change, in this order: "
        + "; ".join(suggestions(update, needs, longest, num_ranks))
    )


@contextlib.contextmanager
def out_of_memory_explained(config: Config, experience: Experience, is_used: bool = False) -> Iterator[None]:
    """Turn torch's errors of insufficient memory into OutOfMemory, which says what to change.

    Args:
        is_used: whether the process had a learner in memory before. Then it says little of what an update
            needs, and the error is one that is tried again.
    """
    try:
        yield
    except RuntimeError as error:
        on_device = isinstance(error, torch.OutOfMemoryError)
        if not on_device and not any(words in str(error) for words in _HOST_WORDS):
            raise
        if is_used:
            raise RuntimeError(f"out of memory in a process that had kept a learner: {error}") from error
        raise OutOfMemory(explain(config, experience, ranks.size(), _memory(on_device)), on_device) from error


def _memory(on_device: bool) -> float:
    """Return the bytes of memory of this rank's GPU, or of the host."""
    if on_device:
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
