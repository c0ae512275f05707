"""Checks of what lies between ranks: the network, and the end of one of them."""

import math
import os
import signal
import time

import torch
from torch import distributed as dist

from stages import ranks
from stages.models.devices import device
from stages.rehearsal.answers import CheckFailed, CheckInput, Shown, with_torch
from stages.rehearsal.meeting import meet
from stages.rehearsal.network import log_nccl, network

_MIB = 64
_ROUNDS = 3
_ROUNDING = 1e-4
"""Relative error that sums in fp32 may have: of many ranks the last of them has more digits than fp32."""
_SLOW_GB = 0.01
"""GB/s of an all-reduce below which an update mostly waits."""


@with_torch
def all_reduce(given: CheckInput) -> Shown:
    """Measure the bandwidth of a sum over all ranks, and name the interface."""
    log = log_nccl(given.folder)
    meet()
    numbers = torch.ones(_MIB << 18, device=device())
    dist.all_reduce(numbers)
    ranks.share(None)
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        dist.all_reduce(numbers)
    total = float(numbers[-1])  # waits for the device
    seconds = (time.perf_counter() - began) / _ROUNDS
    if not math.isclose(total, float(ranks.size()) ** (_ROUNDS + 1), rel_tol=_ROUNDING):
        raise CheckFailed(
            f"the sum over {ranks.size()} ranks is {total}",
            "exclude this node, and report it to the administrators",
        )
    speed = _MIB * 2**20 / seconds / 1e9
    hosts = len(set(ranks.share(os.uname().nodename)))
    ways = sorted(set(ranks.share(network(log))))
    return judged(
        f"{ranks.size()} ranks on {hosts} nodes, {dist.get_backend()}, {'; '.join(ways)}", speed, hosts
    )


def judged(way: str, speed: float, hosts: int) -> Shown:
    """Judge the GB/s of a way between ranks. Raises CheckFailed where they are too few. Pure."""
    measured = f"{way}: {speed:.2f} GB/s for {_MIB} MiB"
    if speed < _SLOW_GB:
        raise CheckFailed(measured, "name the fast interface in NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME")
    return Shown(measured, {"all_reduce_gb_per_s": speed, "nodes": hosts})


@with_torch
def killed_rank(given: CheckInput) -> Shown:
    """Kill the last rank while the others wait for it; the caller measures how soon all have ended."""
    meet()
    numbers = torch.ones(1, device=device())
    dist.all_reduce(numbers)
    if ranks.rank() == ranks.size() - 1:
        (given.folder / "killed-at").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(numbers)
    float(numbers)
    raise CheckFailed(
        "a sum came to its end without the rank that was killed", "report this, with the versions"
    )
