"""Torch settings of a task: reproducible numbers, on the device that it was given. Imported when used."""

import contextlib
import importlib
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC = (":4096:8", ":16:8")
"""Workspaces with which cuBLAS gives the same sums again; tasks have the first, if nothing else is given."""


def choose_accelerator() -> None:
    """Set DeepSpeed's accelerator before it is imported; it would look for devices that are absent."""
    if "DS_ACCELERATOR" not in os.environ:
        import torch

        os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"


def import_deepspeed() -> None:
    """Import DeepSpeed, and what it imports at its first use: an optimizer that is not used here, whose
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
        RuntimeError: one of them does not compute.
    """
    choose_accelerator()
    import torch
    import transformers

    from stages.models.devices import check_gpus_compute
    from stages.models.loading import check_gpus_are_seen

    transformers.logging.disable_progress_bar()
    torch.set_num_threads(num_threads)
    torch.manual_seed(seed)
    be_deterministic()
    check_gpus_are_seen(os.environ)
    check_gpus_compute()


def be_deterministic() -> None:
    """Let torch compute what is the same the next time, where it can."""
    import torch

    os.environ.setdefault(WORKSPACE, _DETERMINISTIC[0])  # read at the first matrix product
    torch.use_deterministic_algorithms(is_deterministic(os.environ), warn_only=True)
    # Deterministic mode also fills all new memory with NaN, to expose reads of uninitialised memory. One
    # thread does so, whatever num_threads is, in a quarter of its time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def is_deterministic(environment: Mapping[str, str]) -> bool:
    """Whether sums are to be the same again. On GPUs cuBLAS needs a workspace for that; where an environment
    gives another one (CUBLAS_WORKSPACE_CONFIG=), torch takes its fastest kernels too. The check
    ``deterministic-cost`` of the rehearsal measures what the deterministic ones cost; no GPU has yet."""
    import torch

    return not torch.cuda.is_available() or environment[WORKSPACE] in _DETERMINISTIC


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


def free_gib() -> float:
    """Return how much memory of the current GPU is free, in GiB, for all processes; without a GPU, how
    much this process has: as a number below 0."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] / 2**30
    pages = Path("/proc/self/statm").read_text().split()
    return -int(pages[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def peak_gpu_memory() -> dict[str, float]:
    """Return the peak GPU memory in GiB; nothing where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"peak_gpu_memory_gib": torch.cuda.max_memory_allocated() / 2**30}
