"""A model under DeepSpeed: gradient steps, and a state that goes on exactly where it stopped.

The state is written as safetensors of whole tensors per parameter, not as DeepSpeed's own checkpoint: that
one is a pickle, which must not be loaded from a shared directory, and is bound to a world size.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from pipeline.updateconfig import Precision, Schedule, UpdateConfig
from stages import ranks
from stages.context import NumericalError
from stages.models import DTYPES, remove_dropout

_MOMENTS = ("exp_avg", "exp_avg_sq")
_LARGEST_BUCKET = 500_000_000
"""Elements; DeepSpeed's own default."""


def learning_rate(peak: float, step: int, total_steps: int, config: UpdateConfig) -> float:
    """Learning rate of the 0-based optimizer step ``step``: a function of counters, so nothing to save."""
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    match config.schedule:
        case Schedule.CONSTANT:
            return peak
        case Schedule.LINEAR:
            return peak * (1 - done)
        case Schedule.COSINE:
            return peak * 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * done))))


class Trainer:
    """One model, its optimizer and its DeepSpeed engine."""

    def __init__(self, name: str, model: PreTrainedModel, peak: float, config: UpdateConfig) -> None:
        import deepspeed

        remove_dropout(model)
        self.name = name
        self.config = config
        self._peak = peak
        optimizer = torch.optim.AdamW(
            model.parameters(), peak, config.betas, config.epsilon, weight_decay=config.weight_decay
        )
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=_engine_config(config, model.num_parameters()),
            dist_init_required=False,
        )
        self.model: PreTrainedModel = self.engine.module
        self.engine.train()
        self.steps = 0
        """Optimizer steps since the run began."""
        self._make_optimizer_state()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        """The AdamW below DeepSpeed's wrapper."""
        wrapper = self.engine.optimizer
        inner: torch.optim.Optimizer = getattr(wrapper, "optimizer", wrapper)
        return inner

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Add the gradients of a part of the loss; after the last one they are complete, summed over ranks.

        Every rank must call this equally often.
        """
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(loss * ranks.size())  # DeepSpeed takes the mean over ranks
        if not is_last:
            self.engine.step()

    def step(self, total_steps: int) -> tuple[float, float]:
        """Take the optimizer step. Returns the gradient norm before clipping, and the learning rate used.

        Raises:
            NumericalError: the gradient norm is not finite; nothing was changed.
        """
        norm = self._gradient_norm()
        if norm is not None and not torch.isfinite(torch.tensor(norm)):
            raise NumericalError(f"the gradient norm of the {self.name} is {norm}")
        rate = learning_rate(self._peak, self.steps, total_steps, self.config)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        self.engine.step()
        self.steps += 1
        norm = float(self.engine.get_global_grad_norm()) if norm is None else norm
        if not torch.isfinite(torch.tensor(norm)):
            raise NumericalError(f"the gradient norm of the {self.name} is {norm}")
        return norm, rate

    def _gradient_norm(self) -> float | None:
        """Known before the step without ZeRO; with it, DeepSpeed tells after the step."""
        if self.config.zero_stage > 0:
            return None
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def save_model(self, folder: Path) -> None:
        """The model as a Hugging Face directory. Every rank takes part; the first one writes.

        Raises:
            NumericalError: a weight is not finite. It is raised on every rank, and nothing is written.
        """
        dtype, state = DTYPES[self.config.precision], {}
        for name, parameter in self.model.named_parameters():  # one whole weight at a time on the device
            weight = self._master(parameter)
            if not bool(torch.isfinite(weight).all()):
                raise NumericalError(f"weight {name} of the {self.name} is not finite; nothing is committed")
            if ranks.is_first():
                state[name] = weight.to(dtype).cpu()
        if not ranks.is_first():
            return
        # Buffers that are saved; tied weights are neither among them nor saved twice.
        saved = self.model.state_dict().keys()
        state |= {name: buffer for name, buffer in self.model.named_buffers() if name in saved}
        if self.model.can_generate():
            # transformers refuses to save settings that it loaded with a warning; the caller copies the file.
            self.model.generation_config = GenerationConfig.from_model_config(self.model.config)
        self.model.save_pretrained(folder, state_dict=state, safe_serialization=True)

    def save_state(self, path: Path) -> None:
        """Optimizer moments, and the fp32 weights where the model directory holds them rounded.

        Every rank takes part; the first one writes.
        """
        tensors: dict[str, Tensor] = {}
        for key, whole in self._state():
            if ranks.is_first():
                tensors[key] = whole.contiguous().cpu()
        if not ranks.is_first():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={"steps": str(self.steps)})

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by name, one at a time; ranks have to take them in step."""
        for name, parameter in self.model.named_parameters():
            for moment in _MOMENTS:
                yield f"{moment}/{name}", self._moment(parameter, moment)
            if self.config.precision is not Precision.FP32:
                yield f"weight/{name}", self._master(parameter)

    def load_state(self, path: Path, steps: int) -> None:
        """Inverse of :meth:`save_state`, at any ZeRO stage and on any number of ranks."""
        with safe_open(path, "pt") as tensors:  # one at a time, as every rank of a node reads them
            for name, parameter in self.model.named_parameters():
                for moment in _MOMENTS:
                    self._set_moment(parameter, moment, tensors.get_tensor(f"{moment}/{name}"))
                if self.config.precision is not Precision.FP32:
                    self._set_master(parameter, tensors.get_tensor(f"weight/{name}"))
        self.steps = steps
        for tensor in self._optimized():  # AdamW's bias correction counts steps
            self._optimizer.state[tensor]["step"] = torch.tensor(float(steps))

    def _master(self, parameter: Tensor) -> Tensor:
        """The whole fp32 weight."""
        from deepspeed.utils import safe_get_full_fp32_param

        if self.config.zero_stage == 0:
            return parameter.detach()
        whole: Tensor = safe_get_full_fp32_param(parameter)
        return whole.view(_shape(parameter))

    def _set_master(self, parameter: Tensor, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if self.config.zero_stage == 3:
            safe_set_local_fp32_param(parameter, _own_part(value))
        else:
            safe_set_full_fp32_param(parameter, value)

    def _moment(self, parameter: Tensor, moment: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        if self.config.zero_stage == 0:
            value: Tensor = self._optimizer.state[parameter][moment]
            return value
        whole: Tensor = safe_get_full_optimizer_state(parameter, moment)
        return whole.view(_shape(parameter))

    def _set_moment(self, parameter: Tensor, moment: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self.config.zero_stage == 0:
            self._optimizer.state[parameter][moment].copy_(value)
        elif self.config.zero_stage == 3:
            safe_set_local_optimizer_state(parameter, _own_part(value), moment)
        else:
            safe_set_full_optimizer_state(parameter, value, moment)

    def _optimized(self) -> list[Tensor]:
        """What AdamW steps: the parameters, or this rank's flat fp32 partitions of them."""
        if self.config.zero_stage == 3:  # its parameter groups are empty between steps
            return list(self.engine.optimizer.fp32_partitioned_groups_flat)
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _make_optimizer_state(self) -> None:
        """AdamW and DeepSpeed make moments at the first step; a checkpoint must find them before it."""
        for tensor in self._optimized():
            moments = {moment: torch.zeros_like(tensor) for moment in _MOMENTS}
            self._optimizer.state[tensor] = {"step": torch.tensor(0.0), **moments}
        if self.config.zero_stage in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()


def _shape(parameter: Tensor) -> torch.Size:
    """ZeRO 3 leaves an empty tensor in place and keeps the shape beside it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _own_part(whole: Tensor) -> Tensor:
    """This rank's part of a tensor, flat, as ZeRO 3 splits it: in equal parts, with zeros after its end.

    DeepSpeed's setters of whole tensors fail on ranks that have such padding.
    """
    length = -(-whole.numel() // ranks.size())
    part = whole.flatten()[length * ranks.rank() : length * (ranks.rank() + 1)]
    return torch.nn.functional.pad(part, (0, length - part.numel()))


def _engine_config(config: UpdateConfig, num_parameters: int) -> dict[str, Any]:
    """DeepSpeed's settings. Batch sizes are ours: every micro-batch is weighted by the whole mini-batch."""
    # At every backward DeepSpeed allocates a bucket of this many elements, however small the model is.
    bucket = min(num_parameters, _LARGEST_BUCKET)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": {"stage": config.zero_stage, "reduce_bucket_size": bucket},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    if config.precision is Precision.BF16:
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
        # In bf16 the sum of a thousand micro-batches loses two thirds of the gradient's norm.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
