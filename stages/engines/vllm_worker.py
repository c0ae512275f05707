"""What runs where vLLM has its model: methods that each of its workers gets, called by their names.

Names and plain values can go to any process of vLLM's; functions only where it may pickle them.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stages.engines.vllm_adapters import count_adapted, pack_shared, shared_weights
from stages.models.hidden import hide_in_vllm
from stages.process.heap import give_back_pages

PATH = f"{__name__}.WorkerExtension"
"""Name of the class for vLLM's ``worker_extension_cls``."""


class WorkerExtension:
    """Methods added to vLLM's worker class."""

    if TYPE_CHECKING:
        vllm_config: Any
        model_runner: Any

        def get_model(self) -> nn.Module: ...

    def hide_ids(self, ids: Sequence[int]) -> None:
        """Give ids that no response may have the probability 0."""
        hide_in_vllm(self.get_model(), ids)

    def names_of_shared_weights(self) -> list[list[str]]:
        return [list(names) for names in shared_weights(self.get_model())]

    def pack_shared_weights(self) -> None:
        pack_shared(self.get_model())

    def num_adapted_weights(self) -> int:
        """Return how many weights an adapter changes."""
        return count_adapted(self.get_model())

    def give_back_cache(self) -> None:
        """Give the pages of a key-value cache that holds nothing back, where it lies in the host's memory:
        vLLM goes through all its blocks, one after the other, and keeps what it has touched once."""
        for cache in self.model_runner.kv_caches:
            if isinstance(cache, torch.Tensor) and cache.is_cpu:
                held = cache.untyped_storage()
                give_back_pages(held.data_ptr(), held.nbytes())

    def forget_peak_memory(self) -> None:
        """Let the peak of GPU memory be that from now on."""
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def facts(self) -> dict[str, int]:
        """Return how this worker computes, its process, and its peak of GPU memory in bytes."""
        return {
            "pid": os.getpid(),
            "model_runner": 2 if self.vllm_config.use_v2_model_runner else 1,
            "async_scheduling": int(self.vllm_config.scheduler_config.async_scheduling),
            "peak_gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0,
        }


def peak_resident_gib(pids: set[int]) -> float:
    """Return the sum of the peaks of host memory of other processes; one that is gone has none."""
    total = 0
    for pid in pids - {os.getpid()}:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return total / 2**20
