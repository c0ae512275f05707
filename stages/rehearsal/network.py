"""The network that goes between ranks: as NCCL says it in its log, and as gloo chooses it."""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil
from torch import distributed as dist

_NETWORK = re.compile(r"NCCL INFO Using network (.+)")
_DEVICES = re.compile(r"NCCL INFO NET/(.+?) : Using ([^;\n]+)")
_DEVICE = re.compile(r"\[\d+\](\S+)")
_WAY = re.compile(r"NCCL INFO Channel .+ via (.+)")
_SOCKETS = "Socket"
_LOOPBACK = "lo"


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
