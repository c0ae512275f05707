"""Checks of devices: what the driver gives to each kind of process, and to each rank."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from pipeline.config.update import Precision
from stages import ranks
from stages.rehearsal.allocation import compute, device, half_precision
from stages.rehearsal.answers import CheckFailed, CheckInput, NotShown, Shown, with_torch
from stages.rehearsal.meeting import meet

_SPAWN_SECONDS = 120
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SEEN = """
import torch

print(*(torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())))
"""


@with_torch
def driver(given: CheckInput) -> Shown:
    """Check the card, number formats and an allocation, in a process that was started plainly."""
    check_expected(given)
    compute()
    versions = f"torch {torch.__version__}"
    if not torch.cuda.is_available():
        return Shown(f"CPU, {versions}; fp32 and bf16 compute")
    capability, free = torch.cuda.get_device_capability(), torch.cuda.mem_get_info()[0] / 2**30
    has_bf16 = half_precision() is Precision.BF16
    formats = "fp32 and bf16" if has_bf16 else "fp32, bf16 only by emulation: set precision=fp16"
    name = torch.cuda.get_device_name()
    return Shown(
        f"{name}, capability {'.'.join(map(str, capability))}, {free:.1f} GiB free, {versions}, "
        f"CUDA {torch.version.cuda or torch.version.hip}; {formats} compute",
        {"free_gib": free, "capability": capability[0] + capability[1] / 10},
    )


@with_torch
def forked(given: CheckInput) -> Shown:
    """Check an allocation in a process forked from the server that has imported the libraries."""
    compute()
    return Shown(f"computes on {device()}, forked from a server that has imported torch")


@with_torch
def spawned(given: CheckInput) -> Shown:
    """Check an allocation in a process that a task spawns, as vLLM does."""
    process = multiprocessing.get_context("spawn").Process(target=compute, daemon=True)
    process.start()
    process.join(_SPAWN_SECONDS)
    if process.exitcode != 0:
        raise CheckFailed(
            f"a spawned process ended with code {process.exitcode}",
            "see its log; a process that sees a GPU and cannot use it often lacks memory or permission",
        )
    return Shown(f"computes on {device()}, spawned by a process that computes")


def check_expected(given: CheckInput) -> None:
    """Raise CheckFailed where GPUs were promised and none can be used, NotShown where they are names only."""
    if torch.cuda.is_available() or not given.gpus:
        return
    shown = os.environ.get(_VISIBLE)
    asked = f"{given.gpus} GPUs were asked for, {_VISIBLE}={'not set' if shown is None else shown}"
    if has_card():
        raise CheckFailed(
            f"{asked}, and torch {torch.__version__} can use none of this machine's",
            "install a torch for CUDA that this driver takes, or pass the devices into the container",
        )
    if not shown or shown in ("-1", "NoDevFiles"):
        raise CheckFailed(
            f"{asked}, and this node shows none", "ask for GPUs (gpus_per_node, gres), or exclude this node"
        )
    raise NotShown(f"{asked}, and this node has no card: they are names only")


def has_card(devices: Path = Path("/dev")) -> bool:
    """Whether there is a device file of a GPU."""
    return any(devices.glob("nvidia[0-9]*")) or (devices / "kfd").exists()


@with_torch
def own_device(given: CheckInput) -> Shown:
    """Check that ranks have devices of their own, by the names that they were given and the cards behind."""
    names = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
    meet()
    mine = identity(names)
    found = ranks.share(mine)
    if not names and not torch.cuda.is_available():
        raise NotShown("no GPU, each rank computes on CPUs")
    if len(set(found)) < len(found):
        raise CheckFailed(
            f"two ranks have the same device: {', '.join(found)}",
            "ask for as many GPUs per node as ranks per node",
        )
    kind = next((form for form in ("MIG", "GPU") if names and names[0].startswith(f"{form}-")), "number")
    named = {"MIG": "MIG names", "GPU": "UUIDs", "number": "numbers"}[kind]
    return Shown(f"{len(found)} ranks on {', '.join(found)}, named by {named}")


@with_torch
def device_names(given: CheckInput) -> Shown:
    """Check that a process sees this one's device alone by its number, UUID or MIG name."""
    if not torch.cuda.is_available():
        raise NotShown("no GPU")
    expected = str(torch.cuda.get_device_properties(0).uuid)
    seen = {name: seen_by(name) for name in forms_of(os.environ.get(_VISIBLE, ""), expected)}
    return judged_names(seen, expected)


def forms_of(shown: str, uuid: str) -> list[str]:
    """Return the names of a process's first device: the one that it was given, and its UUID unless that names
    the whole card of a part. Pure."""
    first = shown.split(",")[0] or "0"
    return list(dict.fromkeys([first] if first.startswith("MIG-") else [first, f"GPU-{uuid}"]))


def seen_by(name: str) -> str:
    """Return the UUIDs of the devices that a new process sees, or what it says instead."""
    done = subprocess.run(
        [sys.executable, "-c", _SEEN],
        env={**os.environ, _VISIBLE: name},
        capture_output=True,
        text=True,
        timeout=_SPAWN_SECONDS,
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else "nothing"


def judged_names(seen: Mapping[str, str], expected: str) -> Shown:
    """Judge what processes have seen by each name. Raises CheckFailed where it is not one device. Pure."""
    if wrong := [f"by {name} {what}" for name, what in seen.items() if what != expected]:
        raise CheckFailed(
            f"the device is {expected}, and a process sees {', '.join(wrong)}",
            "name GPUs as nvidia-smi -L shows them, and look at what the container passes on",
        )
    return Shown(f"one device by each of its names: {', '.join(seen)}")


def identity(names: list[str]) -> str:
    """Return what tells this rank's device from others: its node, and its UUID, or its name where no card is
    behind it."""
    place, node = ranks.RankPlace.of(os.environ), os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    if torch.cuda.is_available():
        return f"{node}/{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return f"{node}/{names[ranks.gpu_index(place, len(names))] if names else f'CPU {place.rank}'}"
