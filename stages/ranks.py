"""The ranks of one task: rendezvous and collectives.

Nothing here knows of schedulers. A launcher sets environment variables:

RANK, WORLD_SIZE, LOCAL_RANK   this process among all, their number, this process among those of its node.
                               Absent: one rank.
RENDEZVOUS_FILE                a path that all ranks see and that no other start of the task has. There rank 0
                               says where it listens; the file is gone again when all have met.
GLOO_SOCKET_IFNAME             network interface to use on CPUs. Absent: the one through which ranks of other
                               nodes reached rank 0. For GPUs see NCCL_SOCKET_IFNAME.
"""

import contextlib
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch import distributed as dist

from pipeline.run.durable import from_json, is_there, read_shared, replace_durably
from stages.context import OtherRankFailed, UserError
from stages.models.devices import DevicePlace, device, device_place, shared_device
from stages.models.numerics import import_deepspeed

MEETING_SECONDS = 300.0
"""Seconds for which ranks wait for each other at the start."""
COLLECTIVE_SECONDS = 1800.0
"""Seconds for which a rank waits for the others later on. One may have more to write than others."""
_POLL_SECONDS = 0.2
_PROBE_SECONDS = 10.0
_TOKEN = "token"
_messages: dist.ProcessGroup | None = None
"""Group of all ranks for what is not computed; None for the default one, where that does not use GPUs."""
_background: dist.ProcessGroup | None = None
"""Group of all ranks for what a thread of each says while they compute; None where there is one rank."""
_thread = threading.local()


@dataclass(frozen=True)
class RankPlace:
    """One process among the ranks of a task."""

    rank: int
    size: int
    local_rank: int

    @staticmethod
    def of(environment: Mapping[str, str]) -> "RankPlace":
        """Read the launcher's variables. Raises UserError when they make no sense."""
        words = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        if words["WORLD_SIZE"] in ("", "1"):
            return RankPlace(0, 1, 0)
        try:
            place = RankPlace(*map(int, words.values()))
        except ValueError:
            raise UserError(f"of several ranks each needs three numbers, and this one has {words}") from None
        if not 0 <= place.local_rank <= place.rank < place.size:
            raise UserError(f"there can be no rank with {words}")
        return place


@dataclass(frozen=True)
class Meeting:
    """The address that rank 0 publishes."""

    hosts: Sequence[str]
    """Name of its node, and the addresses where that leads nowhere."""
    port: int
    token: str
    """Random text that its store holds too, so that no other store, on the same port elsewhere, is mistaken
    for it."""


def start_distributed(limit: float = MEETING_SECONDS) -> None:
    """Join the process group of this task's ranks, which DeepSpeed takes over. Later calls do nothing.

    One rank needs neither address nor port, so what another update on this host uses cannot clash.

    Args:
        limit: seconds to wait for the other ranks.

    Raises:
        UserError: the launcher's variables make no sense, or there are fewer GPUs than ranks on a node.
        TimeoutError: the other ranks did not come; names this rank and what it waited for.
    """
    import_deepspeed()
    import deepspeed
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    # DeepSpeed's ops are built at first use by a compiler, which compute nodes may lack; gloo does the same
    # work. Left to itself, DeepSpeed runs that compiler just to see which ops could be built.
    deepspeed.ops.__compatible_ops__ = dict.fromkeys(ALL_OPS, False)
    if dist.is_initialized():
        return
    place = RankPlace.of(os.environ)
    num_gpus = torch.cuda.device_count()
    # DeepSpeed reads these, and takes LOCAL_RANK for the number of the GPU.
    index = gpu_index(place, num_gpus) if num_gpus else place.local_rank
    os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.size), "LOCAL_RANK": str(index)}
    if num_gpus:
        torch.cuda.set_device(index)
    backend = "nccl" if num_gpus else "gloo"
    store, interface = meet(place, os.environ, limit)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    wait = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=wait)
    if place.size > 1 and place.rank == 0 and (file := os.environ.get("RENDEZVOUS_FILE")):
        Path(file).unlink(missing_ok=True)
    deepspeed.init_distributed(backend, verbose=False)
    global _messages, _background
    if backend != "gloo" and place.size > 1:
        _messages = dist.new_group(backend="gloo", timeout=wait)
    if place.size > 1:
        _background = dist.new_group(backend="gloo", timeout=wait)
    if num_gpus:
        check_own_devices(device_place(index))


def check_own_devices(own: DevicePlace) -> None:
    """Raise UserError, on every rank, where two of them compute on one GPU."""
    if problem := shared_device(share(own)):
        raise UserError(problem)


def gpu_index(place: RankPlace, num_visible: int) -> int:
    """Return the index of this rank's GPU among those that it sees. A launcher may show each rank its own
    only: whether several see the same one is found out when they have met. Raises UserError where there are
    fewer GPUs than ranks."""
    if num_visible == 1:
        return 0
    if place.local_rank >= num_visible:
        raise UserError(
            f"rank {place.rank} is number {place.local_rank} on its node (from 0) and sees {num_visible} "
            "GPUs; ask for as many GPUs per node as ranks per node"
        )
    return place.local_rank


def meet(place: RankPlace, environment: Mapping[str, str], limit: float) -> tuple[dist.Store, str | None]:
    """Return the store through which the ranks find each other, and the network interface, if known."""
    if place.size == 1:
        return dist.HashStore(), None
    if not (file := environment.get("RENDEZVOUS_FILE")):
        raise UserError(f"{place.size} ranks need RENDEZVOUS_FILE to find each other")
    path, address = Path(file), ""
    if place.rank == 0:
        store = open_store(path, limit)
    else:
        store, address = find_store(path, place, limit)
    return store, interface_towards(gather(store, place, address, limit))


def gather(store: dist.Store, place: RankPlace, address: str, limit: float) -> list[str]:
    """Wait until every rank has come; return the address at which each found rank 0.

    Raises:
        TimeoutError: not all came; names those that did not.
    """
    keys = [f"address/{rank}" for rank in range(place.size)]
    store.set(keys[place.rank], address)
    try:
        store.wait(keys, timedelta(seconds=limit))
    except dist.DistError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise TimeoutError(
            f"rank {place.rank} waited {limit:.0f} s for ranks {missing} of {place.size}"
        ) from error
    return [value.decode() for value in store.multi_get(keys)]


def interface_towards(found: Sequence[str]) -> str | None:
    """Return the network interface on the way to rank 0, by the first IPv4 address at which another node
    found it; None if there is none.

    Left to itself, gloo listens where the node's own name leads, which often is the loopback address.
    """
    far = [a for a in found if a and "." in a and not ipaddress.ip_address(a).is_loopback]
    if not far:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((far[0], 1))  # sends nothing, but chooses the way
        own = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if own in [entry.address for entry in entries]), None)


def open_store(path: Path, limit: float) -> dist.TCPStore:
    """Listen on a free port and publish the address at ``path``. For rank 0."""
    wait = timedelta(seconds=limit)
    store = dist.TCPStore("localhost", 0, is_master=True, timeout=wait, wait_for_workers=False)
    meeting = Meeting([socket.gethostname(), *addresses()], store.port, secrets.token_hex(16))
    store.set(_TOKEN, meeting.token)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(path, json.dumps(asdict(meeting)) + "\n")
    return store


def find_store(path: Path, place: RankPlace, limit: float) -> tuple[dist.TCPStore, str]:
    """Wait for the file ``path``, and connect to the address of rank 0 that it holds. For the other ranks.

    Returns:
        The store, and the address at which it was found.

    Raises:
        TimeoutError: there was no such file, or no answer from there; names the rank and the path.
    """
    deadline = time.monotonic() + limit
    missing = f"write {path}"
    while time.monotonic() <= deadline:
        if is_there(path):
            meeting = Meeting(**from_json(read_shared(path)))
            missing = (
                f"answer at port {meeting.port} of any of {', '.join(meeting.hosts)}, which {path} names"
            )
            near = ["localhost"] if socket.gethostname() == meeting.hosts[0] else []
            for host in (*near, *meeting.hosts):
                if found := connect(host, meeting, limit):
                    return found
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(f"rank {place.rank} waited {limit:.0f} s for rank 0 to {missing}")


def connect(host: str, meeting: Meeting, limit: float) -> tuple[dist.TCPStore, str] | None:
    """Return rank 0's store and its address if it answers at ``host``, else None. Its later answers may take
    ``limit`` s."""
    probe = timedelta(seconds=_PROBE_SECONDS)
    try:
        # A store would try an address that drops packets for its whole time limit, and log every try.
        with socket.create_connection((host, meeting.port), timeout=_PROBE_SECONDS) as connection:
            address = str(connection.getpeername()[0])
        store = dist.TCPStore(address, meeting.port, is_master=False, timeout=probe, wait_for_workers=False)
        if store.get(_TOKEN).decode() != meeting.token:
            return None
    except (OSError, dist.DistError):
        return None
    store.set_timeout(timedelta(seconds=limit))
    return store, address


def addresses() -> list[str]:
    """Return the addresses of this node at which others may reach it."""
    entries = [entry for interface in psutil.net_if_addrs().values() for entry in interface]
    found = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
    # On another node these would lead to that node itself.
    own = [a for a in found if ipaddress.ip_address(a).is_loopback or ipaddress.ip_address(a).is_link_local]
    return [address for address in found if address not in own]


# what ranks tell each other; every rank must call these, in the same order


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this rank is the one that writes, publishes and reports."""
    return rank() == 0


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the element-wise sum, on every rank; exact where all ranks but one have 0."""
    return _over_ranks(tensor, dist.ReduceOp.SUM)


def max_over_ranks(tensor: Tensor) -> Tensor:
    """Return the element-wise maximum, on every rank."""
    return _over_ranks(tensor, dist.ReduceOp.MAX)


def _over_ranks(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if size() == 1:
        return tensor
    reduced = tensor.to(device(), copy=True)
    dist.all_reduce(reduced, operation)
    return reduced.to(tensor.device)


def sent_by_first(tensor: Tensor | None, like: Tensor) -> Tensor:
    """Return the first rank's tensor on every rank, in the host's memory.

    Args:
        tensor: the first rank's, in the host's memory; the others have none.
        like: any tensor of its shape and format.
    """
    if size() == 1:
        assert tensor is not None
        return tensor
    empty = torch.empty(like.shape, dtype=like.dtype) if tensor is None else tensor
    sent = empty.to(device()).contiguous()
    dist.broadcast(sent, 0)
    return sent.cpu()


def first_of(problem: str | None) -> str | None:
    """Return the problem of the first rank that has one, on every rank.

    A rank that acted on its own alone would wait for the others in its next collective until that times out.
    """
    if size() == 1:
        return problem
    if not bool(max_over_ranks(torch.tensor(problem is not None, dtype=torch.int32))):
        return None
    problems: list[str | None] = [None] * size()
    dist.all_gather_object(problems, problem)
    return next(text for text in problems if text is not None)


def share(value: Any) -> list[Any]:
    """Return what each rank gave, by rank; any object that can be pickled.

    Ranks wait without computing, unlike in a collective of GPUs, and notice when another is gone.
    """
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    group = _background if getattr(_thread, "is_background", False) else _messages
    dist.all_gather_object(values, value, group)
    return values


@contextlib.contextmanager
def in_background() -> Iterator[None]:
    """Have :func:`share` and :func:`agree` of this thread go through a group of their own: messages of two
    threads in one group would be taken for each other's. At most one thread of a rank may be in here."""
    _thread.is_background = True
    try:
        yield
    finally:
        _thread.is_background = False


def agree(error: Exception | None) -> None:
    """Raise on every rank if any has an error: its own, or in words that of the first that has one."""
    problem = None if error is None else f"rank {rank()}: {type(error).__name__}: {error}"
    found = next((text for text in share(problem) if text is not None), None)
    if error is not None:
        raise error
    if found is not None:
        raise OtherRankFailed(f"another rank failed, {found}")


@contextlib.contextmanager
def agreed(*kinds: type[Exception]) -> Iterator[None]:
    """Have every rank raise at the end of the body what any has raised there, of these kinds
    (:func:`agree`)."""
    error: Exception | None = None
    try:
        yield
    except kinds as problem:
        error = problem
    agree(error)
