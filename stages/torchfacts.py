"""What PyTorch is installed, and what it sees: ``python -m stages.torchfacts`` prints one JSON object.

It is a process of its own, so that whoever asks, such as doctor, has no torch.
"""

import json
import time


def torch_facts() -> dict[str, str | int | float | None]:
    """Return version, CUDA and HIP that it is built for, the number of GPUs, and the seconds of its import.

    Raises:
        ImportError, OSError: it cannot be imported.
    """
    started = time.perf_counter()
    import torch

    seconds = time.perf_counter() - started
    gpus = torch.cuda.device_count()
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpus": gpus,
        "seconds": seconds,
    }


if __name__ == "__main__":
    print(json.dumps(torch_facts()))
