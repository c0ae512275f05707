"""The GPUs of this machine and their names. Nothing here initialises CUDA: forks of a process that did so
can use no GPU."""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipeline.process import said_within
from pipeline.run import nvml

VISIBLE = "CUDA_VISIBLE_DEVICES"
OTHERS = ("HIP_VISIBLE_DEVICES",)
"""Names of the same variable for AMD's GPUs; ROCR_VISIBLE_DEVICES is left as it is, and numbers count from 0
within it."""
_DEVICES = Path("/dev")
_NVML_SECONDS = 20.0
_OF_VLLM = re.compile(r"\s*\d+\s*|GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def has_gpus(devices: Path = _DEVICES) -> bool:
    """Whether there is a GPU of NVIDIA's or AMD's. Opens no driver."""
    return _has_nvidia(devices) or (devices / "kfd").exists()


def _has_nvidia(devices: Path) -> bool:
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


def ask_nvml() -> str:
    """Return why NVML does not say which GPUs there are; empty where it does."""
    done = said_within([sys.executable, "-I", "-S", nvml.__file__], _NVML_SECONDS)
    if done is None:
        return f"no answer in {_NVML_SECONDS:g} s"
    if done.exit_code:
        return f"the program that asks it ended with exit code {done.exit_code}"
    try:
        return str(json.loads(done.text.splitlines()[-1]).get("problem", ""))
    except (IndexError, ValueError):  # what the driver's library writes or does may come between
        return "the program that asks it gave no answer"


def fork_hazard(
    environment: Mapping[str, str] = os.environ,
    devices: Path = _DEVICES,
    ask: Callable[[], str] = ask_nvml,
) -> str:
    """Return why PyTorch could not count GPUs in this environment without initialising CUDA; empty where it
    can. Where not, no library may be imported in a process before it is forked: each asks PyTorch."""
    names = visible_names(environment)
    if names == () or not has_gpus(devices):
        return ""
    if not _has_nvidia(devices):
        return "AMD's GPUs cannot be counted without initialising HIP"
    if names and names[0].startswith("MIG-"):
        return f"{VISIBLE} names parts of GPUs (MIG), which only CUDA itself can count"
    problem = ask()
    return f"GPUs cannot be counted without initialising CUDA ({problem})" if problem else ""


def unknown_to_vllm(names: Sequence[str]) -> str:
    """Return what vLLM makes of the first name that it cannot use, and the way out; empty where it can use
    all. It takes what is no number for a whole GPU's whole UUID, and asks NVML for that one's number."""
    name = next((name for name in names if not _OF_VLLM.fullmatch(name)), None)
    if name is None:
        return ""
    if name.strip().startswith("MIG-"):
        return f"vLLM takes {name}, a part of a GPU (MIG), for another GPU; give whole GPUs"
    return f"vLLM does not find {name}; give numbers, or whole UUIDs as nvidia-smi -L shows them"
