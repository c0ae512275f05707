"""Torch settings of a task: reproducible numbers, on the device that it was given. Imported when used."""

import contextlib
import importlib
import os
import random
import sys
from pathlib import Path


def choose_accelerator() -> None:
    """Set DeepSpeed's accelerator before it is imported; it would look for devices that are absent."""
    if "DS_ACCELERATOR" not in os.environ:
        import torch

        os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"


def import_deepspeed() -> None:
    """Import DeepSpeed, and what it imports at its first use: an optimizer that nobody uses here, whose
    functions it gives to torch's compiler, which takes seconds to import. Here they are not compiled."""
    choose_accelerator()
    from deepspeed.runtime import compiler

    compile_function = compiler.compile
    compiler.compile = lambda *given, **named: lambda function: function
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compile_function


def set_up_torch(num_threads: int, seed: int) -> None:
    """Fix threads and seeds, so that the task gives the same bytes again.

    Raises:
        UserError: none of the GPUs that the task was given is there.
    """
    choose_accelerator()
    import torch
    import transformers

    from stages.models.loading import check_gpus_are_seen

    transformers.logging.disable_progress_bar()
    torch.set_num_threads(num_threads)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Deterministic mode also fills all new memory with NaN, to expose reads of what nobody has written. One
    # thread does so, whatever num_threads is, in a quarter of its time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    check_gpus_are_seen(os.environ)


def set_up_chance(seed: int) -> None:
    """Seed Python's and numpy's generators, so that a user's engine or rule that draws from them gives the
    same bytes, whatever was drawn in this process before."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def forget_peaks() -> None:
    """Let the peaks of memory be those from now on, of this task. Where the system cannot do so, that of the
    host's memory is the process's."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_gpu_memory() -> dict[str, float]:
    """Return the peak GPU memory in GiB; nothing where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"peak_gpu_memory_gib": torch.cuda.max_memory_allocated() / 2**30}
