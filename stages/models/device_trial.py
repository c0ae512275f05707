"""A trial of the GPUs that a process sees: memory, and a product of matrices, on each.

The driver's library for monitoring also counts GPUs that the driver, or this build of torch, cannot use.
Needs torch alone: a probe job runs this file's text in images that lack slurm-ppo.
"""

from collections.abc import Sequence

IMPORTED = "torch is imported"
"""First line of this program; the second says what is wrong."""
_SIZE = 8


def try_gpus(numbers: "Sequence[int] | None" = None) -> str:
    """Return why a GPU cannot compute, in the driver's words; empty where each can, or its memory is only
    full, or torch is built for CPUs. Initialises CUDA.

    Args:
        numbers: of those that this process sees. None: all of them.
    """
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return ""
    try:
        chosen = range(torch.cuda.device_count()) if numbers is None else numbers
        wrong = [number for number in chosen if not _computes(number)]
    except RuntimeError as error:  # of drivers, kernels and memory
        said = str(error).strip().splitlines() or [""]
        return "" if "out of memory" in said[0] else f"{type(error).__name__}: {said[0]}"
    if wrong:
        return f"GPU {wrong[0]} computes wrong numbers"
    return "" if chosen else "PyTorch sees no GPU"


def _computes(number: int) -> bool:
    import torch

    ones = torch.ones(_SIZE, _SIZE, device=f"cuda:{number}")
    return float((ones @ ones).sum()) == _SIZE**3


if __name__ == "__main__":
    import torch  # noqa: F401

    print(IMPORTED, flush=True)
    print(try_gpus())
