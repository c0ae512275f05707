"""Check of copies from a card to the host's memory, as a trainer's state takes them: page-locked or not."""

import time
from collections.abc import Callable

import torch

from stages.rehearsal.answers import CheckInput, NotShown, Shown, with_torch

_GIB = 1
_TIMES = 3


@with_torch
def host_copies(given: CheckInput) -> Shown:
    """Measure a copy of one GiB into new memory, of which page-locking is a part, and into locked memory."""
    if not torch.cuda.is_available():
        raise NotShown("needs a GPU")
    source = torch.zeros(_GIB << 30, dtype=torch.uint8, device="cuda")
    locked = torch.empty_like(source, device="cpu", pin_memory=True)
    return judged(
        best(lambda: source.to("cpu")),
        best(lambda: torch.empty_like(source, device="cpu", pin_memory=True).copy_(source)),
        best(lambda: locked.copy_(source)),
    )


def judged(pageable: float, locking: float, locked: float) -> Shown:
    """Describe copies of one GiB by their seconds. Pure.

    Args:
        locking: of a copy into memory that is page-locked for it.
        locked: of a copy into memory that was page-locked before.
    """
    rates = [f"{_GIB * 2**30 / 1e9 / seconds:.1f} GB/s" for seconds in (pageable, locking, locked)]
    measured = (
        f"to new memory {rates[0]}, to memory page-locked for it {rates[1]}, once that is locked {rates[2]}"
    )
    return Shown(measured, {"pageable_s": pageable, "locking_s": locking, "locked_s": locked})


def best(work: Callable[[], object]) -> float:
    """Return the fewest seconds of some times that something on a card takes."""

    def seconds() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    return min(seconds() for _ in range(_TIMES))
