"""Whether GPUs can be counted before processes are forked. Nothing here initialises CUDA: forks of a process
that did so can use no GPU."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline.gpus import DEVICES, VISIBLE, has_gpus, has_nvidia, visible_names
from pipeline.process import said_within
from pipeline.run import nvml

_NVML_SECONDS = 20.0


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
    devices: Path = DEVICES,
    ask: Callable[[], str] = ask_nvml,
) -> str:
    """Return why PyTorch could not count GPUs in this environment without initialising CUDA; empty where it
    can. Where not, no library may be imported in a process before it is forked: each asks PyTorch."""
    names = visible_names(environment)
    if names == () or not has_gpus(devices):
        return ""
    if not has_nvidia(devices):
        return "AMD's GPUs cannot be counted without initialising HIP"
    if names and names[0].startswith("MIG-"):
        return f"{VISIBLE} names parts of GPUs (MIG), which only CUDA itself can count"
    problem = ask()
    return f"GPUs cannot be counted without initialising CUDA ({problem})" if problem else ""
