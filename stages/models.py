"""Loading Hugging Face models from directories: safetensors only, no hub, no dropout."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from pipeline.updateconfig import Precision
from stages.context import UserError

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}


def device() -> torch.device:
    """The GPU that was given to this process, or the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def check_gpus_are_seen(environment: Mapping[str, str]) -> None:
    """That the GPUs which the task was given are there. Which ones it may use is never changed.

    Raises:
        UserError: none of them is: the stage would compute on the CPU, for days.
    """
    given = environment.get("CUDA_VISIBLE_DEVICES", "")
    is_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    if problem := missing_gpus(given, is_for_gpus, torch.cuda.is_available()):
        raise UserError(problem)
    if given and not is_for_gpus:
        print(
            f"CUDA_VISIBLE_DEVICES={given}, but torch is built for CPUs here: computing on them", flush=True
        )


def missing_gpus(given: str, is_for_gpus: bool, is_any_seen: bool) -> str | None:
    """What is wrong when a task was given GPUs and sees none.

    Args:
        given: CUDA_VISIBLE_DEVICES; what Slurm writes where a job has no GPU is not one.
        is_for_gpus: whether torch is built for any.
    """
    if given in ("", "-1", "NoDevFiles") or is_any_seen or not is_for_gpus:
        return None
    return (
        f"CUDA_VISIBLE_DEVICES={given}: none of these GPUs can be used on this node; look at nvidia-smi "
        "there, and at what the job asked for (scheduler.STAGE.gpus_per_node)"
    )


def load_causal_lm(
    directory: str | Path,
    precision: Precision,
    trust_remote_code: bool,
    device_map: str | None = None,
    attention: str | None = None,
) -> PreTrainedModel:
    """A policy or reference model. For ``attention`` see :class:`UpdateConfig`."""
    return _load(AutoModelForCausalLM, directory, precision, trust_remote_code, device_map, attention)


def load_reward_model(
    directory: str | Path, precision: Precision, trust_remote_code: bool, device_map: str | None = None
) -> PreTrainedModel:
    """A sequence-classification model with one output. Raises UserError when it has another number."""
    model = _load(AutoModelForSequenceClassification, directory, precision, trust_remote_code, device_map)
    if model.config.num_labels != 1:
        raise UserError(f"{directory} has {model.config.num_labels} outputs; a reward model has 1")
    return model


def load_critic(
    directory: str | Path, precision: Precision, trust_remote_code: bool, attention: str | None = None
) -> PreTrainedModel:
    """A backbone with one value per token. A head that the directory lacks starts at zero, so that the first
    advantages are not noise (huggingface/blog, "The N implementation details of RLHF with PPO").

    Raises:
        UserError: the directory lacks weights of the backbone.
    """
    arguments = _arguments(directory, precision, trust_remote_code)
    arguments["config"].num_labels = 1
    model, loading = _with_attention(AutoModelForTokenClassification, directory, attention, arguments)
    missing = set(loading["missing_keys"])
    _check_missing(directory, model, [k for k in missing if k.startswith(f"{model.base_model_prefix}.")])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in missing:
                parameter.zero_()
    return model


def _load(
    auto_class: Any,
    directory: str | Path,
    precision: Precision,
    trust: bool,
    device_map: str | None,
    attention: str | None = None,
) -> PreTrainedModel:
    placement = {"device_map": device_map} if device_map else {}
    arguments = _arguments(directory, precision, trust) | placement
    model, loading = _with_attention(auto_class, directory, attention, arguments)
    _check_missing(directory, model, loading["missing_keys"])
    model.eval()
    return model if device_map else model.to(device())


def _check_missing(directory: str | Path, model: PreTrainedModel, keys: Iterable[str]) -> None:
    """Raises UserError if there is any."""
    if missing := sorted(keys):
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise UserError(
            f"{directory} lacks weights of {type(model).__name__}: {shown}; they would be random numbers"
        )


def _with_attention(
    auto_class: Any, directory: str | Path, attention: str | None, arguments: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and what loading it was like.

    Raises:
        UserError: it cannot be had with this attention.
    """
    if attention is None:
        return auto_class.from_pretrained(str(directory), output_loading_info=True, **arguments)
    try:
        return auto_class.from_pretrained(
            str(directory), output_loading_info=True, attn_implementation=attention, **arguments
        )
    except (ValueError, ImportError) as error:
        raise UserError(
            f"update.attention={attention}: {directory} cannot be loaded with it ({error}); leave it out for "
            "the model's own, or try sdpa or eager"
        ) from error


def _arguments(directory: str | Path, precision: Precision, trust_remote_code: bool) -> dict[str, Any]:
    common = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(str(directory), **common)
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return {**common, "config": config, "dtype": DTYPES[precision], "use_safetensors": True}


def remove_dropout(model: nn.Module) -> None:
    """Dropout would make old and new log-probabilities of the same weights differ."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
