"""Copies of a state in the host's memory: whether there is room for them, and how they are made."""

import resource
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipeline.memory import free_bytes
from stages import ranks

_SPARE = 1.1
"""What copying takes of the host's memory, relative to what is copied."""
_ALIGNED = 64
"""Bytes at whose multiples copies begin."""


def lacking_room(needed: float) -> str | None:
    """Return in words which host lacks room for what its ranks need; None where none does. Every rank takes
    part, and they share a host's memory.

    Args:
        needed: bytes that this rank copies.
    """
    by_rank = ranks.share((socket.gethostname(), _SPARE * needed, free_bytes()))
    by_host: dict[str, list[tuple[float, float]]] = {}
    for host, num_bytes, room in by_rank:
        by_host.setdefault(host, []).append((num_bytes, room))
    for host, pairs in by_host.items():
        total, room = sum(num_bytes for num_bytes, _ in pairs), min(room for _, room in pairs)
        if total > room:
            return f"{total / 2**30:.2f} GiB of memory are needed on {host}, and {room / 2**30:.2f} are free"
    return None


_passing: int | None = None
"""Bytes by which this process was larger during its first update than at its end."""


def passing_bytes() -> int:
    """Return by how much the memory of this process was larger during an update than at its end: what the
    next one takes again, beside a copy. Measured once, before there was any copy."""
    global _passing
    if _passing is None:
        most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        _passing = max(0, most - pages * resource.getpagesize())
    return _passing


def copies(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield copies of tensors on any device, in one piece of memory, which goes back to the system as one. It
    is pageable: each part is copied to once, and page-locking takes longer than it saves then."""
    sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    for tensor, piece in zip(tensors, memory.split(sizes), strict=True):
        yield piece[: tensor.nbytes].view(tensor.dtype).copy_(tensor)
