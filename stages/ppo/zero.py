"""DeepSpeed's settings, and the optimizer that it steps."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from pipeline.config.update import Precision, UpdateConfig
from stages.models.devices import device
from stages.ppo.adamw import AdamWInParts
from stages.ppo.bare import Bare, filled
from stages.ppo.host_adamw import host_adamw

_AT_ONCE = 1 << 20
"""Elements of a gradient that are added to the fp32 sum at once."""
_LARGEST_BUCKET = 500_000_000
"""Elements of the buckets together; DeepSpeed's own default."""


def engine_settings(config: UpdateConfig, num_parameters: int, backend: str = "gloo") -> dict[str, Any]:
    """Return DeepSpeed's settings. Batch sizes are 1: our losses are weighted by the whole mini-batch.

    Args:
        backend: by which the ranks talk. With nccl, ZeRO 1 and 2 reduce gradients while others are computed,
            as ZeRO 3 always does. No GPU has shown how much that saves.
    """
    overlaps = backend == "nccl" and config.zero in (1, 2)
    # At every backward DeepSpeed allocates a bucket of this many elements, however small the model is; two
    # where one is reduced while the other is filled.
    bucket = min(num_parameters, _LARGEST_BUCKET // 2 if overlaps else _LARGEST_BUCKET)
    zero: dict[str, Any] = {"stage": config.zero, "reduce_bucket_size": bucket}
    if overlaps:
        zero["overlap_comm"] = True
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": backend == "nccl"}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # A mean is divided in half precision, which rounds where the ranks are no power of two.
        "gradient_allreduce_op": "mean" if takes_mean(config) else "sum",
        "steps_per_print": 1 << 30,
    }
    match config.precision:
        case Precision.BF16:
            # Each gradient is added to the fp32 sum as soon as it is there, and freed.
            at_once = {"immediate_grad_update": True}
            settings["bf16"] = {"enabled": True, "check_grad_overflow": True, **at_once}
        case Precision.FP16:
            settings["fp16"] = {"enabled": True, "hysteresis": 1}
    if config.precision is not Precision.FP32:
        # In bf16 the sum of a thousand micro-batches loses two thirds of the gradient's norm, and that of
        # many ranks loses as well.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        settings["communication_data_type"] = "fp32"
    return settings


def takes_mean(config: UpdateConfig) -> bool:
    """Whether DeepSpeed takes the mean of gradients over ranks; else their sum, which ZeRO 3 has not."""
    return config.zero == 3


def device_map_of(config: UpdateConfig) -> str | None:
    """Return where a model is loaded to: into the host's memory if it is then shared out over the ranks."""
    return "cpu" if config.zero == 3 else None


def share_out(model: nn.Module, settings: dict[str, Any], bare: Bare | None = None) -> None:
    """Split the weights of a model over the ranks, one weight at a time: no device ever holds all of them.
    What is not a weight goes to every device. For ZeRO 3.

    Args:
        model: in the host's memory, or without weights.
        bare: where the weights are that it does not have.
    """
    import deepspeed

    if bare is not None:
        model.parameters = lambda recurse=True: filled(bare)  # type: ignore[method-assign]
    deepspeed.zero.Init(module=model, config_dict_or_path=settings)
    if bare is not None:
        del model.parameters
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device())


def undo_sharing() -> None:
    """Give torch its own linear layers back, which :func:`share_out` replaces for as long as the process
    lives: with a bias they round otherwise."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patched

    torch.nn.functional.linear = getattr(Patched, "linear_bk", torch.nn.functional.linear)


def permit_fp16_on_cpu() -> None:
    """Permit fp16, which DeepSpeed refuses on CPUs without fp16 instructions; torch computes it, slowly."""
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True


def add_in_parts(optimizer: Any) -> None:
    """Let DeepSpeed's optimizer for bf16 add each gradient to its fp32 sum without a copy of it in fp32: that
    of a vocabulary's weights would be the largest tensor of a backward pass."""

    @torch.no_grad()
    def add(parameter: Any, group: int, index: int) -> None:
        total, gradient = optimizer.fp32_groups_gradients[group][index], parameter.grad.reshape(-1)
        for part, some in zip(total.split(_AT_ONCE), gradient.split(_AT_ONCE), strict=True):
            part.add_(some)
        parameter._hp_grad = total
        optimizer.fp32_groups_has_gradients[group][index] = True
        parameter.grad = None

    if hasattr(optimizer, "accumulate_hp_grads_and_remove_lp"):
        optimizer.accumulate_hp_grads_and_remove_lp = add


@contextlib.contextmanager
def gradients_divided(optimizer: Any, times: float) -> Iterator[None]:
    """Let a step of DeepSpeed's, in half precision with ZeRO 3, divide its fp32 gradients by ``times``."""
    if times == 1:
        yield
        return
    scaler = optimizer.loss_scaler
    before, scaled = scaler.cur_scale, scaler.cur_scale * times
    scaler.cur_scale = scaled
    yield
    scaler.cur_scale = before * (scaler.cur_scale / scaled)  # which the step may have changed


def adamw(parameters: Iterable[nn.Parameter], peak: float, config: UpdateConfig) -> torch.optim.Optimizer:
    """Make AdamW, on the host's cores where the optimizer's state is kept there.

    Raises:
        UserError: AdamW for the host cannot be compiled.
    """
    if config.offload_optimizer:
        return host_adamw(parameters, peak, config)
    kind = AdamWInParts if device().type == "cpu" else torch.optim.AdamW
    return kind(parameters, peak, config.betas, config.epsilon, weight_decay=config.weight_decay)
