"""The GPUs of a task's process: whether they compute, and that each rank has one of its own."""

import functools
import multiprocessing
import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from pipeline.gpus import visible_names
from pipeline.process import joined_within
from stages.models.device_trial import try_gpus

if TYPE_CHECKING:
    import torch

_NIL = "00000000-0000-0000-0000-000000000000"
_TRIAL_SECONDS = 60.0
_END_SECONDS = 5.0


def device() -> "torch.device":
    """Return the GPU that was given to this process, or the CPU."""
    import torch

    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


@functools.cache
def check_gpus_compute() -> None:
    """Check, once in a process, that the GPUs of this task compute. Without a GPU nothing is started, nor
    where this process computes on one already.

    Raises:
        RuntimeError: one does not; says why in the driver's words.
    """
    import torch

    if torch.cuda.is_initialized() or not torch.cuda.is_available():
        return
    if problem := tried_in_child(own_numbers(os.environ, torch.cuda.device_count()), _TRIAL_SECONDS):
        raise RuntimeError(
            f"the GPUs of this task do not compute: {problem}; look at nvidia-smi on this node"
        )


def own_numbers(environment: Mapping[str, str], count: int) -> list[int]:
    """Return the numbers of the GPUs that this process computes on, of those that it sees: of several ranks
    each has one; where all of a machine are seen and none is given, that is the first."""
    if environment.get("WORLD_SIZE", "1") != "1":
        return [int(environment.get("LOCAL_RANK", "0")) % count]
    return list(range(1 if visible_names(environment) is None else count))


def tried_in_child(numbers: Sequence[int], seconds: float) -> str:
    """Try GPUs in a fork, which neither a driver that hangs nor one that ends it can take this process
    with. Returns what is wrong, if anything."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_send_trial, args=(writer, numbers), daemon=True)
    child.start()
    writer.close()
    try:
        return str(reader.recv()) if reader.poll(seconds) else f"no answer in {seconds:g} s"
    except EOFError:
        child.join(_END_SECONDS)
        return f"a process that tried them ended with exit code {child.exitcode}"
    finally:
        child.kill()
        joined_within(child, _END_SECONDS)
        reader.close()


def _send_trial(writer: Connection, numbers: Sequence[int]) -> None:
    writer.send(try_gpus(numbers))


@dataclass(frozen=True)
class DevicePlace:
    """A GPU, and the node that it is in."""

    host: str
    uuid: str
    """As ``nvidia-smi -L`` shows it; empty where the driver gives none."""


def device_place(index: int) -> DevicePlace:
    """Return the GPU that this process sees under a number. Initialises CUDA."""
    import torch

    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    prefix = "" if uuid.startswith(("GPU-", "MIG-")) else "GPU-"
    return DevicePlace(socket.gethostname(), prefix + uuid if uuid not in ("", _NIL) else "")


def shared_device(places: Sequence[DevicePlace]) -> str | None:
    """Return what is wrong where two ranks compute on one GPU; else None. Pure.

    Args:
        places: of each rank, by rank.
    """
    ranks: dict[DevicePlace, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        ranks[place].append(rank)
    for place, several in ranks.items():
        if place.uuid and len(several) > 1:
            return (
                f"ranks {', '.join(map(str, several))} of the update on host {place.host} were all given the "
                f"GPU {place.uuid}; give each rank one of its own: scheduler.update.gpus_per_node=N for "
                "ntasks_per_node=N, or on one machine as many GPUs as scheduler.update.ranks"
            )
    return None
