"""Set-up before vLLM is imported: the environment that it reads, and the key of what it compiles."""

import importlib.metadata
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from pipeline.config.engines import VllmConfig
from stages.context import UserError

_PLACES = frozenset({"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "VLLM_DIST_IDENT"})
"""Variables that only say where things are."""


def be_quiet() -> None:
    """Let vLLM log errors only, unless the user's environment asks for more. Call before importing it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def set_up(given: VllmConfig) -> None:
    """Set the variables that vLLM reads from the environment, most of them while it is imported."""
    be_quiet()
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process
        "VLLM_HOST_IP": "127.0.0.1",  # all its workers are on this node
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
        # Threads are the stage's num_threads. Left to itself, every task would bind to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        # Its files are pickles named by the model's path, which is another for every policy.
        "VLLM_USE_AOT_COMPILE": "0",
    }
    # A port given to all tasks of a node would be fought for; without, each takes a free one.
    os.environ.pop("VLLM_PORT", None)
    # Memory that is about to be written need not be filled.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Even eager engines compile a helper, in 20 s on a CPU, for nothing that a short stage would notice.
    torch._dynamo.config.disable = given.enforce_eager
    os.environ["TORCH_COMPILE_DISABLE"] = str(int(given.enforce_eager))  # for workers of their own


def cache_key(arguments: Mapping[str, Any]) -> str:
    """Return all that compiled code depends on: versions, settings, environment, processor, model shape."""
    text = (Path(arguments["model"]) / "config.json").read_text()
    others = sorted((name, str(value)) for name, value in arguments.items() if name != "model")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    processor = torch.backends.cpu.get_cpu_capability()
    versions = [torch.__version__, vllm_version(), sys.version]
    names = [name for name in os.environ if name.startswith(("VLLM_", "TORCH")) and name not in _PLACES]
    environment = {name: os.environ[name] for name in sorted(names)}
    return repr([text, others, device, processor, versions, environment])


def vllm_version() -> str:
    """Return the installed package and its version. Raises UserError when neither is installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise UserError("engine=vllm: vLLM is not installed; install slurm-ppo[vllm], or see docs/howto/vllm.md")
