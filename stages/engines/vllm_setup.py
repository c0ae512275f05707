"""Start of vLLM: the environment that it reads, its arguments, what it compiles and what it refuses."""

import functools
import importlib.metadata
import os
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from pipeline.config.engines import VllmConfig
from pipeline.config.schema import Config
from pipeline.config.update import Precision
from stages.context import UserError
from stages.engines.base import Limits
from stages.engines.compiled import KeptCache, private_cache

_PLACES = frozenset(
    {
        "VLLM_CACHE_ROOT",
        "TORCHINDUCTOR_CACHE_DIR",
        "VLLM_DIST_IDENT",
        "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
    }
)
"""Variables that only say where things are."""
_FORMATS = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP16: "float16"}
_CPU_CACHE_GIB = 1.0
_REFUSAL = re.compile(
    r"architecture.*support|support.*architecture|no valid attention backend|support.*head_?(dim|size)|"
    r"head_?(dim|size).*support|not support lora",
    re.IGNORECASE,
)


class Unsupported(UserError):
    """vLLM does not know the model, or not for the use at hand, or has no kernel for its shape."""


def is_refusal(text: str) -> bool:
    """Whether vLLM says that it has no code for this model, in one of the wordings of its parts."""
    return _REFUSAL.search(text) is not None


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
    # FlashInfer's sampler takes no request that has a seed, as all of ours have; still, each engine would
    # import it and try whether it can be compiled here, where there may be no compiler.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
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
    return repr([text, others, device, processor, versions, _environment()])


@functools.cache
def _environment() -> dict[str, str]:
    """Return the variables that vLLM and torch read, as they were at the first start in this process: vLLM
    adds some of its own when it is imported."""
    names = [name for name in os.environ if name.startswith(("VLLM_", "TORCH")) and name not in _PLACES]
    return {name: os.environ[name] for name in sorted(names)}


def vllm_version() -> str:
    """Return the installed package and its version. Raises UserError when neither is installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise UserError("engine=vllm: vLLM is not installed; install slurm-ppo[vllm], or see docs/howto/vllm.md")


def check_gpus(stage: str, given: VllmConfig) -> None:
    """Raise UserError when the task was not given the GPUs that the model is to be split over."""
    needed = given.tensor_parallel_size * given.pipeline_parallel_size
    visible = torch.cuda.device_count()
    if needed > max(1, visible):
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise UserError(
            f"{stage}.vllm: tensor_parallel_size={given.tensor_parallel_size} times pipeline_parallel_size="
            f"{given.pipeline_parallel_size} needs {needed} GPUs, and this task sees {visible} "
            f"(CUDA_VISIBLE_DEVICES={'not set' if shown is None else shown}); let each task of this stage "
            f"have as many (gpus_per_node={needed}), or give smaller sizes"
        )


def common_arguments(config: Config, stage: str, directory: str, limits: Limits) -> dict[str, Any]:
    """Return vLLM's EngineArgs for a model of the rollout or the reward stage."""
    section = config.rollout if stage == "rollout" else config.reward
    precision = config.rollout_precision if stage == "rollout" else config.reward_precision
    given, has_gpu = section.vllm, torch.cuda.is_available()
    cache = given.kv_cache_gib or (None if has_gpu else _CPU_CACHE_GIB)
    arguments = {
        "model": directory,
        "skip_tokenizer_init": True,
        "trust_remote_code": config.model.trust_remote_code,
        "load_format": "safetensors",
        "use_tqdm_on_load": False,
        "dtype": _FORMATS[precision],
        "seed": 0,  # every request has its own
        "tensor_parallel_size": given.tensor_parallel_size,
        "pipeline_parallel_size": given.pipeline_parallel_size,
        "gpu_memory_utilization": given.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if cache is None else int(cache * 2**30),
        "max_model_len": limits.context if limits.context < Limits.NONE else None,
        "max_num_seqs": given.max_num_seqs,
        "max_num_batched_tokens": given.max_num_batched_tokens,
        "enable_prefix_caching": given.enable_prefix_caching,
        # On a CPU a seeded request whose prompt is computed in two steps ends the engine.
        "enable_chunked_prefill": None if has_gpu else False,
        "enforce_eager": given.enforce_eager,
        "disable_log_stats": True,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def start(stage: str, config: Config, arguments: dict[str, Any]) -> tuple[Any, KeptCache]:
    """Start an engine; return it, and the cache of what it compiles.

    Raises:
        UserError: vLLM is not installed, or refuses the configuration.
        Unsupported: it does not know the model.
    """
    given = (config.rollout if stage == "rollout" else config.reward).vllm
    set_up(given)
    kept = private_cache(Path(config.run_dir), cache_key(arguments), given.keep_compiled)
    os.environ |= kept.variables
    arguments = arguments | {"compilation_config": {"cache_dir": str(kept.folder / "graphs")}}
    try:
        return _started(stage, arguments), kept
    except BaseException:
        kept.discard()
        raise


def _started(stage: str, arguments: dict[str, Any]) -> Any:
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise UserError(
            f"{stage}.engine=vllm: vLLM cannot be imported ({error}); install slurm-ppo[vllm] on GPU nodes, "
            "or vllm-cpu as docs/howto/vllm.md says, or take engine=transformers"
        ) from error
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        # The defaults of vLLM's own offline class: others take small steps.
        return LLMEngine.from_engine_args(EngineArgs(**arguments), UsageContext.LLM_CLASS)
    except (ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())
        if is_refusal(text):
            raise Unsupported(f"{stage}.engine=vllm: {text}; take engine=transformers for it") from error
        if isinstance(error, RuntimeError):
            raise
        if "Free memory on device" in text:  # another process has it, which may end
            raise RuntimeError(
                f"{stage}.engine=vllm: another process uses the GPU ({text}); on one machine give "
                f"scheduler.slots=1, or a smaller {stage}.vllm.gpu_memory_utilization"
            ) from error
        raise UserError(f"{stage}.engine=vllm: vLLM refuses to start: {text}; see {stage}.vllm") from error
    finally:
        torch.set_num_threads = set_num_threads  # vLLM's worker puts a function there that does nothing
        torch.set_num_threads(threads)
