"""What PyTorch is installed, what it sees, and what its import asks of the filesystem: ``python -m
stages.trials.torchfacts`` prints one JSON object.

It is a process of its own, so that its callers, such as doctor, import no torch.
"""

import contextlib
import json
import os
import posix
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from stages.models.device_trial import try_gpus

SOURCE = "source"
_LOOKS = frozenset({"open", "os.listdir", "os.scandir"})


def counted_calls() -> Counter[str]:
    """Return a count that grows with the calls of this process for files: what a shared filesystem's servers
    are asked. It cannot be ended, so this is for processes of their own."""
    calls: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        act = getattr(posix, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return act(*arguments, **options)

        return counted

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _LOOKS:
            calls[event] += 1
        if event == "compile":
            calls[SOURCE] += str(arguments[1]).endswith(".py")

    for name in ("stat", "lstat", "readlink"):
        counted = counting(name)
        setattr(posix, name, counted)  # what importlib calls, for every folder of sys.path and every module
        setattr(os, name, counted)
    sys.addaudithook(note)
    return calls


def torch_facts() -> dict[str, Any]:
    """Return version, CUDA and HIP that it is built for, the number of GPUs, for NVIDIA's also their names
    with their compute capability, and what the build has code for, why one of them does not compute (empty if
    all do, or there are none), and the seconds of its import;
    the calls by which Python looked for files and opened them, without those of the dynamic loader, and how
    many modules it compiled, as there was no file of theirs that is.

    Raises:
        ImportError, OSError: it cannot be imported.
    """
    calls = counted_calls()
    started = time.perf_counter()
    import torch

    seconds = time.perf_counter() - started
    gpus = torch.cuda.device_count()
    problem = try_gpus() if gpus else ""
    has_cards = gpus > 0 and torch.version.cuda is not None
    names: list[Any] = []
    if has_cards:
        with contextlib.suppress(RuntimeError):  # the problem says why
            names = [torch.cuda.get_device_properties(index) for index in range(gpus)]
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpus": gpus,
        "problem": problem,
        "cards": sorted({(one.name, one.major, one.minor) for one in names}),
        "architectures": torch.cuda.get_arch_list() if has_cards else [],
        "seconds": seconds,
        "calls": calls.total() - calls[SOURCE],
        "sources": calls[SOURCE],
    }


if __name__ == "__main__":
    print(json.dumps(torch_facts()))
