"""A model under DeepSpeed: gradient steps, and a state from which training resumes exactly.

The state is written as safetensors of whole tensors per parameter, not as DeepSpeed's own checkpoint: that
one is a pickle, which must not be loaded from a shared directory, and is bound to a world size.
"""

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from pipeline.config.update import Precision, Schedule, UpdateConfig
from stages import ranks
from stages.context import NumericalError
from stages.models import DTYPES, switch_off_chance
from stages.ppo.lora import is_adapted, save_policy
from stages.ppo.zero import adamw, engine_settings, permit_fp16_on_cpu, share_out

_MOMENTS = ("exp_avg", "exp_avg_sq")
_LARGEST_FILE = 4 * 2**30
"""Bytes of a file of the state, and so of the host's memory that writing it takes."""
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter")
"""State of DeepSpeed's dynamic loss scaler: the scale, and two counters whose difference says for how many
steps it has been good. Its hysteresis is 1, so it has no third counter."""


@dataclass(frozen=True)
class Step:
    """The outcome of an optimizer step; the same on every rank."""

    norm: float
    """Norm of the gradient, before clipping. Not finite exactly if the step was skipped."""
    rate: float
    """Learning rate."""
    is_taken: bool
    """Whether the step was taken; else nothing was changed, and the gradients are gone."""
    is_overflow: bool
    """Whether it was skipped because the loss scale of fp16 was too high, and has been lowered."""


def learning_rate(peak: float, position: int, total: int, config: UpdateConfig) -> float:
    """Return the learning rate of a mini-batch, by its 0-based position among all that the run plans: a
    function of counters, so there is nothing to save, and steps not taken do not delay the schedule.
    """
    if position < config.warmup_steps:
        return peak * (position + 1) / config.warmup_steps
    done = (position - config.warmup_steps) / max(1, total - config.warmup_steps)
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

        if config.precision is Precision.FP16:
            permit_fp16_on_cpu()
        if config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.name = name
        self.config = config
        self._peak = peak
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        settings = engine_settings(config, sum(parameter.numel() for parameter in trained))
        if config.zero_stage == 3:
            share_out(model, settings)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=adamw(trained, peak, config),
            config=settings,
            dist_init_required=False,
        )
        self.model: PreTrainedModel = self.engine.module
        switch_off_chance(self.model)
        if config.precision is Precision.FP16:  # else DeepSpeed ends the run
            self.engine.optimizer.loss_scaler.raise_error_at_min_scale = False
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

    def step(self, position: int, total: int) -> Step:
        """Take the optimizer step, or skip it if the gradient norm is not finite. Every rank takes part.

        Args:
            position: 0-based position of the mini-batch among the ``total`` that the run plans.
        """
        rate = learning_rate(self._peak, position, total, self.config)
        if self.config.zero_stage == 0:  # DeepSpeed would take it whatever the gradient is
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))  # with ZeRO, known after the step
            if not math.isfinite(norm):
                self.discard()
                return Step(norm, rate, is_taken=False, is_overflow=False)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        scale = self._loss_scale
        self.engine.step()
        norm = norm if self.config.zero_stage == 0 else float(self.engine.get_global_grad_norm())
        is_taken = math.isfinite(norm)
        if not is_taken:
            self._clear_partitions()
        self.steps += is_taken
        return Step(norm, rate, is_taken, is_overflow=not is_taken and self._loss_scale < scale)

    def discard(self) -> None:
        """Throw away the gradients that ``backward`` has completed, even NaN. What follows is as if they had
        never been. Every rank takes part.
        """
        scaler = self._scaler_state()
        # DeepSpeed keeps parts of a gradient in many places, and clears them all in its step. So it takes one
        # in which AdamW does nothing.
        optimizer: Any = self._optimizer
        optimizer.step = lambda: None
        try:
            self.engine.step()
        finally:
            del optimizer.step
        self._clear_partitions()
        self._set_scaler_state(scaler)

    def _clear_partitions(self) -> None:
        """Clear gradients where DeepSpeed does not: after a skipped step of an optimizer on the host it would
        add the next gradient to the one that is not finite."""
        if self.config.offload_optimizer and self.config.zero_stage < 3:
            partitions = self.engine.optimizer.averaged_gradients
            partitions.update(dict.fromkeys(partitions))

    @property
    def _loss_scale(self) -> float:
        """Loss scale; 1 unless in fp16."""
        return float(getattr(self.engine.optimizer, "loss_scale", 1.0))

    def _scaler_state(self) -> dict[str, float]:
        """Return the state of the dynamic loss scaler. Empty unless in fp16."""
        if self.config.precision is not Precision.FP16:
            return {}
        return {name: getattr(self.engine.optimizer.loss_scaler, name) for name in _LOSS_SCALE}

    def _set_scaler_state(self, state: dict[str, float]) -> None:
        for name, value in state.items():
            setattr(self.engine.optimizer.loss_scaler, name, value)

    def save_model(self, folder: Path) -> None:
        """Write the model as a Hugging Face directory, of a model with adapters what
        :func:`stages.ppo.lora.save_policy` does. Every rank takes part; the first one writes.

        Raises:
            NumericalError: a weight is not finite. It is raised on every rank, and nothing is written.
        """
        has_adapters = is_adapted(self.model)
        dtype, state = torch.float32 if has_adapters else DTYPES[self.config.precision], {}
        for name, parameter in self._trained() if has_adapters else self.model.named_parameters():
            weight = self._master(parameter)
            if not bool(torch.isfinite(weight).all()):
                raise NumericalError(f"weight {name} of the {self.name} is not finite; nothing is committed")
            if ranks.is_first():
                state[name] = weight.to(dtype).cpu()
        if not ranks.is_first():
            return
        if has_adapters:
            save_policy(self.model, state, folder)
            return
        # Buffers that are saved; tied weights are neither among them nor saved twice.
        saved = self.model.state_dict().keys()
        state |= {name: buffer for name, buffer in self.model.named_buffers() if name in saved}
        if self.model.can_generate():
            # transformers refuses to save settings that it loaded with a warning; the caller copies the file.
            self.model.generation_config = GenerationConfig.from_model_config(self.model.config)
        self.model.save_pretrained(folder, state_dict=state, safe_serialization=True)

    def save_state(self, path: Path) -> None:
        """Write optimizer moments, counters, and the fp32 weights where the model directory holds them
        rounded or merged.

        Every rank takes part; the first one writes.
        """
        # As one entry, because safetensors writes several in random order.
        metadata = {"counters": json.dumps({"steps": self.steps, **self._scaler_state()})}
        if ranks.is_first():
            path.parent.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        size = number = 0
        for key, whole in self._state():
            if not ranks.is_first():
                continue
            if tensors and size + whole.nbytes > _LARGEST_FILE:
                save_file(tensors, _part(path, number), metadata)
                tensors, size, number = {}, 0, number + 1
            tensors[key] = whole.contiguous().cpu()
            size += whole.nbytes
        if ranks.is_first():
            save_file(tensors, _part(path, number), metadata)

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors by name, one at a time; ranks have to take them in step."""
        for name, parameter in self._trained():
            for moment in _MOMENTS:
                yield f"{moment}/{name}", self._moment(parameter, moment)
            if self._has_weights:
                yield f"weight/{name}", self._master(parameter)

    @property
    def _has_weights(self) -> bool:
        """Whether the state has weights."""
        return self.config.precision is not Precision.FP32 or is_adapted(self.model)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def load_state(self, path: Path) -> None:
        """Restore what :meth:`save_state` wrote, at any ZeRO stage and on any number of ranks."""
        with contextlib.ExitStack() as files:  # one tensor at a time, as every rank of a node reads them
            parts = [files.enter_context(safe_open(part, "pt")) for part in _parts(path)]
            counters = json.loads(parts[0].metadata()["counters"])
            saved = {key: part for part in parts for key in part.keys()}  # noqa: SIM118 - no dict
            for name, parameter in self._trained():
                for moment in _MOMENTS:
                    key = f"{moment}/{name}"
                    self._set_moment(parameter, moment, saved[key].get_tensor(key))
                if self._has_weights:
                    self._set_master(parameter, saved[f"weight/{name}"].get_tensor(f"weight/{name}"))
        self.steps = counters.pop("steps")
        self._set_scaler_state(counters)
        for tensor in self._optimized():  # AdamW's bias correction counts steps
            self._optimizer.state[tensor]["step"] = self._step_count()

    def _master(self, parameter: Tensor) -> Tensor:
        """Return the whole weight, in fp32 if it is trained."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        if not parameter.requires_grad and self.config.zero_stage == 3:
            with GatheredParameters([parameter]):
                return parameter.detach().clone()
        if not parameter.requires_grad or self.config.zero_stage == 0:
            return parameter.detach()
        whole: Tensor = safe_get_full_fp32_param(parameter)
        return whole.view(_shape(parameter))

    def _set_master(self, parameter: Tensor, value: Tensor) -> None:
        """Set the fp32 weight; of an adapter also the weight that is computed with, still its initial one."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if self.config.zero_stage == 3:
            safe_set_local_fp32_param(parameter, _own_part(value))
        elif self.config.zero_stage > 0:
            safe_set_full_fp32_param(parameter, value)
        if is_adapted(self.model):
            is_partitioned = self.config.zero_stage == 3
            with GatheredParameters([parameter], modifier_rank=0, enabled=is_partitioned):
                parameter.data.copy_(value)

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
        """Return what AdamW steps: the parameters, or this rank's flat fp32 partitions of them."""
        if self.config.zero_stage == 3:  # its parameter groups are empty between steps
            return list(self.engine.optimizer.fp32_partitioned_groups_flat)
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _step_count(self) -> Tensor | int:
        """Return the step count in the type that this AdamW takes."""
        return self.steps if self.config.offload_optimizer else torch.tensor(float(self.steps))

    def _make_optimizer_state(self) -> None:
        """Make moments, which a checkpoint must find; AdamW and DeepSpeed make them at the first step."""
        for tensor in self._optimized():
            moments = {moment: torch.zeros_like(tensor) for moment in _MOMENTS}
            self._optimizer.state[tensor] = {"step": self._step_count(), **moments}
        if self.config.zero_stage in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()


def _part(path: Path, number: int) -> Path:
    """Return the path of one file of a state: ``policy.safetensors``, ``policy-1.safetensors`` and so on."""
    return path if number == 0 else path.with_name(f"{path.stem}-{number}{path.suffix}")


def _parts(path: Path) -> Iterator[Path]:
    numbered = (_part(path, number) for number in itertools.count())
    return itertools.takewhile(Path.exists, numbered)


def _shape(parameter: Tensor) -> torch.Size:
    """Return the whole shape: ZeRO 3 leaves an empty tensor in place and keeps the shape beside it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _own_part(whole: Tensor) -> Tensor:
    """Cut out this rank's part of a tensor, flat, as ZeRO 3 splits it: equal parts, with zeros after its end.

    DeepSpeed's setters of whole tensors fail on ranks that have such padding.
    """
    length = -(-whole.numel() // ranks.size())
    part = whole.flatten()[length * ranks.rank() : length * (ranks.rank() + 1)]
    return torch.nn.functional.pad(part, (0, length - part.numel()))
