"""Checks of what lies between ranks: the network, as NCCL says it in its log or gloo chooses it, and the end
of one of them."""

import ipaddress
import math
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
from torch import distributed as dist

from stages import ranks
from stages.models.devices import device
from stages.rehearsal.answers import CheckFailed, CheckInput, Shown, with_torch
from stages.rehearsal.meeting import meet

_MIB = 64
_ROUNDS = 3
_ROUNDING = 1e-4
"""Relative error that sums in fp32 may have: of many ranks the last of them has more digits than fp32."""
_SLOW_GB = 0.01
"""GB/s of an all-reduce below which an update mostly waits."""
_NETWORK = re.compile(r"NCCL INFO Using network (.+)")
_DEVICES = re.compile(r"NCCL INFO NET/(.+?) : Using ([^;\n]+)")
_DEVICE = re.compile(r"\[\d+\](\S+)")
_WAY = re.compile(r"NCCL INFO Channel .+ via (.+)")
_SOCKETS = "Socket"
_LOOPBACK = "lo"


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


# --- which network ---


def log_nccl(folder: Path) -> Path:
    """Let NCCL write what it chooses to a file of this rank, which is returned. Call it before NCCL is used:
    it reads these variables once."""
    path = folder / f"nccl-{os.environ.get('RANK', '0')}.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(path)}
    return path


def network(log: Path) -> str:
    """Return in words through what this rank reaches the others. Call it after a sum over all.

    Args:
        log: as :func:`log_nccl` returns it.
    """
    if dist.get_backend() == "nccl":
        said = log.read_text(errors="replace") if log.exists() else ""
        return chosen_by_nccl(said) or "a network that NCCL's log does not name"
    return f"interface {chosen_by_gloo(os.environ)}"


def chosen_by_nccl(said: str) -> str:
    """Return what NCCL says of its network, that network's interfaces, and the ways that data takes, which
    between GPUs of a node are others. Empty where it says nothing of a network. Pure.

    Args:
        said: log of its subsystems INIT and NET.
    """
    networks = _NETWORK.findall(said)
    if not networks:
        return ""
    name = networks[-1].strip()
    listed = next((text for kind, text in _DEVICES.findall(said) if kind == name), "")
    devices = [_device(text, name) for text in _DEVICE.findall(listed)]
    ways = sorted({_way(text) for text in _WAY.findall(said)})
    through = f" ({', '.join(devices)})" if devices else ""
    return f"network {name}{through}" + (f", data by {', '.join(ways)}" if ways else "")


def _device(text: str, network: str) -> str:
    """Return ``eth0`` of ``eth0:10.0.0.1<0>``; ``mlx5_0:1/IB`` is as it is."""
    return text.partition(":")[0] if network == _SOCKETS else text


def _way(text: str) -> str:
    """Return ``NET/IB/GDRDMA`` of ``NET/IB/3/GDRDMA``: without the number of a device."""
    return "/".join(part for part in text.strip().split("/") if not part[:1].isdigit())


def chosen_by_gloo(environment: Mapping[str, str]) -> str:
    """Return the interface that gloo listens on: the one that is set, which ranks on several nodes have; else
    that of this host's name, and the loopback where the name leads to no address of this host."""
    return environment.get("GLOO_SOCKET_IFNAME") or interface_of(own_address(socket.gethostname()))


def own_address(host: str) -> str:
    """Return the first address of a name that this host can listen on; the loopback's if there is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return str(address[0])
    return "127.0.0.1"


def interface_of(address: str) -> str:
    """Return the network interface of this host that has an address; the address itself where none has."""
    if ipaddress.ip_address(
        address.partition("%")[0]
    ).is_loopback:  # also 127.0.1.1, which no interface lists
        return f"{_LOOPBACK} (by this host's name)"
    interfaces = psutil.net_if_addrs().items()
    names = [name for name, entries in interfaces if address in [entry.address for entry in entries]]
    return f"{names[0] if names else address} (by this host's name)"
