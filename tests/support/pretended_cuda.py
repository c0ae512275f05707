"""PyTorch as if it were built for CUDA, with all its own code that counts GPUs; importing this pretends it.

Only the driver is missing: each call that would initialise it is written down instead. ``python -m
tests.support.pretended_cuda DEVICES HIDDEN SHOWN`` reads environments from standard input, and prints what is
decided in each: in the first before, in all others after the library of a monitored driver is there.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

calls: list[str] = []
"""Calls of the driver in this process, and in those that it was forked from."""


def _count() -> int:
    calls.append("cudaGetDeviceCount")
    return 1


torch._C._cuda_getDeviceCount = _count
torch._C._cuda_getCurrentRawStream = lambda index: 0


def decide(environment: Mapping[str, str], devices: str) -> dict[str, object]:
    """What the program decides in an environment, and whether that has called the driver."""
    from pipeline.run.gpus import fork_hazard
    from stages.models.numerics import choose_accelerator

    os.environ.update(environment)
    hazard, called = fork_hazard(os.environ, Path(devices)), bool(calls)
    choose_accelerator()
    return {
        "hazard": hazard,
        "called by us": called,
        "called by PyTorch": bool(calls),
        "is initialized": torch.cuda.is_initialized(),
        "accelerator": os.environ["DS_ACCELERATOR"],
    }


def report(words: Sequence[str]) -> int:
    """In a task's process: print what the server that it was forked from has done, and what is seen here."""
    inherited = {"called": bool(calls), "is initialized": torch.cuda.is_initialized()}
    print(json.dumps({**inherited, "torch": sorted({"deepspeed", "transformers"} & set(sys.modules))}))
    return 0


def main(devices: str, hidden: str, shown: str) -> None:
    first, *others = json.load(sys.stdin)
    context = multiprocessing.get_context("fork")  # each in a process of its own, with torch imported once
    with context.Pool(1, maxtasksperchild=1) as pool:
        found = pool.starmap(decide, [(first, devices)])
        Path(hidden).rename(shown)
        print(json.dumps(found + pool.starmap(decide, [(one, devices) for one in others], chunksize=1)))


if __name__ == "__main__":
    main(*sys.argv[1:])
