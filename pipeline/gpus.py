"""The GPUs of this machine, by device files, the environment, and the driver's own program. Nothing here
initialises CUDA."""

import functools
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.process import said_within

VISIBLE = "CUDA_VISIBLE_DEVICES"
OTHERS = ("HIP_VISIBLE_DEVICES",)
"""Names of the same variable for AMD's GPUs; ROCR_VISIBLE_DEVICES is left as it is, and numbers count from 0
within it."""
DEVICES = Path("/dev")
_ASK_SECONDS = 20.0
_OF_VLLM = re.compile(r"\s*\d+\s*|GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def has_gpus(devices: Path = DEVICES) -> bool:
    """Whether there is a GPU of NVIDIA's or AMD's. Opens no driver."""
    return has_nvidia(devices) or (devices / "kfd").exists()


def has_nvidia(devices: Path) -> bool:
    return any(devices.glob("nvidia[0-9]*"))


def visible_names(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to this process; None where it is not set. As in CUDA,
    what follows -1 does not count."""
    given = environment.get(VISIBLE, environment.get(OTHERS[0]))
    if given is None:
        return None
    names: list[str] = []
    for name in (word.strip() for word in given.split(",")):
        if name in ("", "-1", "NoDevFiles"):
            break
        names.append(name)
    return tuple(dict.fromkeys(names))


def unknown_to_vllm(names: Sequence[str]) -> str:
    """Return what vLLM makes of the first name that it cannot use, and the way out; empty where it can use
    all. It takes what is no number for a whole GPU's whole UUID, and asks NVML for that one's number."""
    name = next((name for name in names if not _OF_VLLM.fullmatch(name)), None)
    if name is None:
        return ""
    if name.strip().startswith("MIG-"):
        return f"vLLM takes {name}, a part of a GPU (MIG), for another GPU; give whole GPUs"
    return f"vLLM does not find {name}; give numbers, or whole UUIDs as nvidia-smi -L shows them"


@dataclass(frozen=True)
class CardHere:
    """A GPU of this machine."""

    name: str
    capability: tuple[int, int]
    """Compute capability."""


@functools.cache
def nvidia_cards() -> tuple[CardHere, ...]:
    """Ask the driver's program for NVIDIA's GPUs here; none where there are none, or it says nothing."""
    if not has_nvidia(DEVICES) or shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=compute_cap,name", "--format=csv,noheader"]
    done = said_within(command, _ASK_SECONDS)
    if done is None or done.exit_code:
        return ()
    return tuple(card for line in done.text.splitlines() if (card := card_of(line)))


def card_of(line: str) -> CardHere | None:
    """Return the card of a line such as ``8.0, NVIDIA A100-SXM4-40GB``; None of any other line. Pure."""
    found = re.fullmatch(r"\s*(\d+)\.(\d+),\s*(.+?)\s*", line)
    return CardHere(found[3], (int(found[1]), int(found[2]))) if found else None
