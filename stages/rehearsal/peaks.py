"""Memory that a call takes: of this process's GPU, by torch's own count; without one, of the process."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

from stages.process.heap import give_back_freed

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
"""Parameters of mallopt(3)."""


def give_back_what_is_freed() -> None:
    """Have the C library return freed memory to the system, by which it can be measured what is in use."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(_MMAP_THRESHOLD, 1 << 16)
    libc.mallopt(_ARENA_MAX, 1)


def taken_by(call: Callable[[], object]) -> float:
    """Return the most bytes that a call has at a time, beyond those that are in use before it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return float(torch.cuda.max_memory_allocated() - before)
    give_back_freed()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    call()
    return float(_status("VmHWM") - before)


def resident() -> int:
    """Return the bytes of this process in memory."""
    return _status("VmRSS")


def context_bytes() -> float:
    """Return what this process's GPU lacks beside what torch has reserved: its context and libraries, if no
    other process uses it."""
    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved())


def _status(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024
