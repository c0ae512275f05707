"""Advice when memory does not suffice: which setting to change first, with the numbers of this run."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.config.algorithm import Estimator
from pipeline.config.schema import Config
from pipeline.config.update import UpdateConfig
from pipeline.decide.device_faults import DeviceFault, diagnose
from pipeline.forecast.parts import PASSING, PeakPhase
from pipeline.forecast.shapes import ModelShape, read_shape
from pipeline.forecast.training import BatchSize, Ranks, update_parts
from pipeline.run.failures import FailureKind
from stages import ranks
from stages.context import OutOfMemory
from stages.ppo.experience import Experience

_GIB = 2**30
_OVERHEAD = 2 * _GIB
"""Bytes of a GPU's memory that a process may hold beside what torch has reserved."""
_HOST_WORDS = ("can't allocate memory", "not enough memory")
"""Phrases in the errors that torch raises when the host has no memory left; it has no class for them."""


@dataclass(frozen=True)
class Needs:
    """Memory that one rank needs for the policy, roughly, in bytes."""

    states: float
    """Weights, gradients and optimizer state."""
    activations: float
    """Activations of one micro-batch, logits included."""


def needs_of(config: UpdateConfig, shape: ModelShape, micro_batch: int, num_ranks: int) -> Needs:
    """Estimate memory by the formulas that runs are checked with before they start, for micro-batches of
    ``micro_batch`` tokens."""
    batch, ranks = (
        BatchSize(micro_batch, micro_batch, micro_batch),
        Ranks(num_ranks, torch.cuda.is_available()),
    )
    found = [
        part
        for part in update_parts(config, shape, None, None, batch, ranks)
        if PeakPhase.POLICY_BACKWARD in part.during
    ]
    passing = sum(part.size for part in found if part.name in PASSING)
    held = sum(part.size for part in found if part.is_certain and part.name not in PASSING)
    return Needs(held, passing)


def suggestions(config: UpdateConfig, needs: Needs, longest: int, num_ranks: int) -> list[str]:
    """Return settings to change, the most useful first. ``longest``: tokens of the longest sequence."""
    smaller_batch, smaller_states = [], []
    if (budget := config.micro_batch_tokens) > longest:
        half = max(longest, budget // 2)
        smaller_batch.append(f"update.tokens_per_micro_batch={half} (now {budget}; longest row {longest})")
    if not config.activation_checkpointing:
        smaller_batch.append("update.activation_checkpointing=true")
    if config.zero < 3 and num_ranks > 1:
        next_stage = 3 if config.lora else config.zero + 1
        smaller_states.append(f"update.zero_stage={next_stage} (now {config.zero})")
    if not config.offload_optimizer and config.lora is None:
        smaller_states.append(f"update.offload_optimizer=true with zero_stage={max(1, config.zero)}")
    smaller_states.append(f"more ranks (now {num_ranks}) with zero_stage=3")
    if config.lora is None:
        smaller_states.append("update.lora={}")
    if needs.activations >= needs.states:
        return smaller_batch + smaller_states
    return smaller_states + smaller_batch


def explain(config: Config, experience: Experience, num_ranks: int, has: float) -> str:
    """Say in one line what memory there is, what is needed, what to change. ``has``: bytes of memory."""
    update = config.update
    longest = max((row.length for row in experience.rows), default=0)
    micro_batch = max(update.micro_batch_tokens, longest)
    shape = read_shape(Path(config.model.policy), lora=update.lora)
    needs = needs_of(update, shape, micro_batch, num_ranks)
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

    No retry enlarges a GPU's memory: another try helps only where something else had a part of it. Of the
    host's memory a retry may get more.

    Args:
        is_used: whether the process had a learner in memory before. Then it says little of what an update
            needs, and the error is one that is tried again.
    """
    try:
        yield
    except RuntimeError as error:
        on_device = is_of_device(error)
        if not on_device and not is_of_host(error):
            raise
        if is_used:
            words = f"out of memory in a process that had kept a learner: {error}"
            raise OutOfMemory(words, FailureKind.ERROR) from error
        card = _card() if on_device else None
        has = card.total if card else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        words, kind = explain(config, experience, ranks.size(), has), FailureKind.MEMORY
        if card:
            kind = FailureKind.ERROR if card.is_shared else FailureKind.CONFIG
            words = f"{card.in_words}{words}" if card.is_shared else words
        raise OutOfMemory(words, kind) from error


def is_of_device(error: RuntimeError) -> bool:
    """Whether an error is that a GPU's memory did not suffice."""
    found = diagnose(f"{type(error).__name__}: {error}")
    return found is not None and found.row.fault is DeviceFault.MEMORY


def is_of_host(error: RuntimeError) -> bool:
    """Whether an error is that the host's memory did not suffice."""
    return any(words in str(error) for words in _HOST_WORDS)


@dataclass(frozen=True)
class CardMemory:
    """Memory of a GPU, in bytes."""

    total: int
    others: int
    """What neither is free nor was reserved by this process's torch."""

    @property
    def is_shared(self) -> bool:
        """Whether others use it: more than contexts, NCCL and libraries of this process take."""
        return self.others > _OVERHEAD

    @property
    def in_words(self) -> str:
        return (
            f"others use {self.others / _GIB:.1f} of the GPU's {self.total / _GIB:.1f} GiB, which nvidia-smi "
            "names: another try may find it free; "
        )


def _card() -> CardMemory:
    """Look at this rank's GPU while what the update holds is still there."""
    free, total = torch.cuda.mem_get_info()
    return CardMemory(total, total - free - torch.cuda.memory_reserved())
