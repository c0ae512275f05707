"""A model under DeepSpeed: gradient steps, and a state from which training resumes exactly.

The state is written as safetensors (:mod:`stages.ppo.state`), not as DeepSpeed's own checkpoint: that one is
a pickle, which must not be loaded from a shared directory, and is bound to a world size.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.config.update import Precision, UpdateConfig
from stages import ranks
from stages.context import NumericalError
from stages.models.loading import DTYPES, switch_off_chance
from stages.ppo.bare import Bare
from stages.ppo.lora import is_adapted, save_policy
from stages.ppo.math.rates import learning_rate
from stages.ppo.state.model_files import ModelFiles, plan_files
from stages.ppo.state.saved_state import File, SavedState, files_of, read_counters
from stages.ppo.state.slices import MOMENTS, WEIGHT, Slice, held, own
from stages.ppo.state.sums import sums_of
from stages.ppo.state.tensor_files import Described
from stages.ppo.zero import (
    adamw,
    add_in_parts,
    engine_settings,
    gradients_divided,
    permit_fp16_on_cpu,
    share_out,
    takes_mean,
    undo_sharing,
)
from stages.process.heap import give_back_freed
from stages.training import removed_on_failure

_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter")
"""State of DeepSpeed's dynamic loss scaler: the scale, and two counters whose difference says for how many
steps it has been good. Its hysteresis is 1, so it has no third counter."""


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of an optimizer step; the same on every rank."""

    norm: float
    """Norm of the gradient, before clipping. Not finite exactly if the step was skipped."""
    rate: float
    """Learning rate."""
    is_taken: bool
    """Whether the step was taken; else nothing was changed, and the gradients are gone."""
    is_overflow: bool
    """Whether it was skipped because the loss scale of fp16 was too high, and has been lowered."""


class Trainer:
    """One model, its optimizer and its DeepSpeed engine."""

    def __init__(self, name: str, model: PreTrainedModel | Bare, peak: float, config: UpdateConfig) -> None:
        """Take a model; for ZeRO 3 it may be without weights, which are then read as they are shared out."""
        import deepspeed

        model, bare = (model.model, model) if isinstance(model, Bare) else (model, None)
        if config.precision is Precision.FP16:
            permit_fp16_on_cpu()
        if config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.name = name
        self.config = config
        self._peak = peak
        number = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        settings = engine_settings(config, number, torch.distributed.get_backend())
        if config.zero == 3:
            share_out(model, settings, bare)
        else:
            undo_sharing()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=adamw(trained, peak, config), config=settings, dist_init_required=False
        )
        self.model: PreTrainedModel = self.engine.module
        add_in_parts(self.engine.optimizer)
        if self._is_alone:  # nothing is summed over ranks, and for that DeepSpeed copies all gradients
            self.engine.enable_backward_allreduce = False
        switch_off_chance(self.model)
        if config.precision is Precision.FP16:  # else DeepSpeed ends the run
            self.engine.optimizer.loss_scaler.raise_error_at_min_scale = False
        self.steps = 0
        """Optimizer steps since the run began."""
        self._make_optimizer_state()
        give_back_freed()  # the weights as they were loaded, where DeepSpeed has made others of them

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        """The AdamW below DeepSpeed's wrapper."""
        wrapper = self.engine.optimizer
        inner: torch.optim.Optimizer = getattr(wrapper, "optimizer", wrapper)
        return inner

    def backward(self, loss: Tensor, is_last: bool, num_shares: int | None = None) -> None:
        """Add the gradients of a part of the loss; after the last one they are complete, summed over ranks.

        Every rank must call this equally often.

        Args:
            num_shares: number of ranks whose gradients these are to be, bit for bit; by default the number
                that there is.
        """
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(loss * self._factor(num_shares))
        if not is_last:
            self.engine.step()
        elif self._is_alone:
            for _, parameter in self.trained():  # AdamW would leave out those that no loss depends on
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    @property
    def _is_alone(self) -> bool:
        """Whether gradients are those of this process alone, as the model has them."""
        return self.config.zero == 0 and ranks.size() == 1

    def _factor(self, num_shares: int | None) -> int:
        """Return what losses are multiplied by where DeepSpeed takes the mean over ranks. In half precision
        it decides how gradients are rounded, and whether they overflow, unless it is a power of two."""
        if not takes_mean(self.config):
            return 1
        is_exact = self.config.precision is Precision.FP32
        return ranks.size() if is_exact or num_shares is None else num_shares

    def step(self, position: int, total: int, num_shares: int | None = None) -> StepOutcome:
        """Take the optimizer step, or skip it if the gradient norm is not finite. Every rank takes part.

        Args:
            position: 0-based position of the mini-batch among the ``total`` that the run plans.
            num_shares: as of :meth:`backward`.
        """
        rate = learning_rate(self._peak, position, total, self.config)
        if self.config.zero == 0:  # DeepSpeed would take it whatever the gradient is
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))  # with ZeRO, known after the step
            if not math.isfinite(norm):
                self.discard()
                return StepOutcome(norm, rate, is_taken=False, is_overflow=False)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        scale = self._loss_scale
        with gradients_divided(self.engine.optimizer, self._factor(num_shares) / self._factor(None)):
            self.engine.step()
        norm = norm if self.config.zero == 0 else float(self.engine.get_global_grad_norm())
        is_taken = math.isfinite(norm)
        if not is_taken:
            self._clear_partitions()
        self.steps += is_taken
        return StepOutcome(norm, rate, is_taken, is_overflow=not is_taken and self._loss_scale < scale)

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

    def skip(self) -> None:
        """Throw the gradients away as a step does whose gradient is not finite. Every rank takes part."""
        self.discard()
        if self.config.precision is Precision.FP16:
            self.engine.optimizer.loss_scaler.update_scale(True)

    def _clear_partitions(self) -> None:
        """Clear gradients where DeepSpeed does not: after a skipped step of an optimizer on the host it would
        add the next gradient to the one that is not finite."""
        if self.config.offload_optimizer and self.config.zero < 3:
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
        found = {name: getattr(self.engine.optimizer.loss_scaler, name) for name in _LOSS_SCALE}
        return {name: float(value) for name, value in found.items()}  # it mixes both kinds of numbers

    def _set_scaler_state(self, state: dict[str, float]) -> None:
        for name, value in state.items():
            setattr(self.engine.optimizer.loss_scaler, name, value)

    def counters(self) -> dict[str, float]:
        """Return what counts: the steps taken, and in fp16 the state of the loss scaler."""
        return {"steps": self.steps, **self._scaler_state()}

    def set_counters(self, counters: Mapping[str, float]) -> None:
        """Restore what :meth:`counters` returned."""
        self.steps = int(counters["steps"])
        self._set_scaler_state({name: value for name, value in counters.items() if name != "steps"})
        for tensor in self._optimized():  # AdamW's bias correction counts steps
            self._optimizer.state[tensor]["step"] = self._step_count()

    def save_model(self, folder: Path) -> list[File]:
        """Write the model as a Hugging Face directory; of a model with adapters what
        :func:`stages.ppo.lora.save_policy` does. Every rank takes part (:meth:`ModelFiles.write`).

        Raises:
            NumericalError: a weight is not finite. It is raised on every rank, and nothing is left.
        """
        with removed_on_failure(folder):
            return self._save_adapters(folder) if is_adapted(self.model) else self.model_files().write(folder)

    def _save_adapters(self, folder: Path) -> list[File]:
        """Write what is committed of a model with adapters, on the first rank. Its files are not durable yet,
        so that nothing is returned."""
        weights: dict[str, Tensor] = {}
        for name, parameter in self.trained():
            weight = self._master(parameter)  # every rank takes part
            if not bool(torch.isfinite(weight).all()):
                raise NumericalError(f"weight {name} of the {self.name} is not finite; nothing is committed")
            if ranks.is_first():
                weights[name] = weight.cpu()
        with ranks.agreed(OSError):
            if ranks.is_first():
                save_policy(self.model, weights, folder)
        return []

    def model_files(self) -> ModelFiles:
        """Return the files that the model is written to, and how each weight is got.

        A policy's are these, unless it has adapters.
        """
        dtype, saved = DTYPES[self.config.precision], self.model.state_dict().keys()
        # Tied weights are neither among the parameters twice nor saved twice.
        parameters = dict(self.model.named_parameters())
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in saved}
        tensors = [Described(name, dtype, tuple(_shape(p))) for name, p in parameters.items()]
        tensors += [Described(name, b.dtype, tuple(b.shape)) for name, b in buffers.items()]

        def gather(name: str, is_wanted: bool) -> Tensor | None:
            if name in buffers:
                return buffers[name] if is_wanted else None
            weight = self._computed_with(parameters[name], is_wanted)
            return None if weight is None else weight.to(dtype)

        return ModelFiles(self.model, plan_files(self.model, tensors), gather)

    def _computed_with(self, parameter: nn.Parameter, is_wanted: bool) -> Tensor | None:
        """Return the whole weight that the model computes with, where it is wanted. With ZeRO 3 every rank
        takes part, and the weight is gathered."""
        from deepspeed.runtime.zero import GatheredParameters

        if self.config.zero < 3:
            return parameter.detach() if is_wanted else None
        with GatheredParameters([parameter]):
            return parameter.detach().clone() if is_wanted else None

    def held(self) -> list[Slice]:
        """Return this rank's part of each parameter that is trained: views, through which it is changed."""
        return list(held(self.trained(), self._optimizer, self.config.zero))

    def own(self) -> list[Slice]:
        """Return what this rank writes of the state; all ranks together write all of it."""
        return own(self.held(), self.config.zero)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of tensors in the state: moments, and fp32 weights where the model directory holds them
        rounded or merged."""
        is_exact = self.config.precision is Precision.FP32 and not is_adapted(self.model)
        return MOMENTS if is_exact else (*MOMENTS, WEIGHT)

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return the sums over each tensor, weights included. Every rank takes part.

        Raises:
            NumericalError: a weight or moment is not finite; on every rank.
        """
        found = sums_of(self.own(), [name for name, _ in self.trained()])
        for key, pair in found.items():
            if not all(map(math.isfinite, pair)):
                raise NumericalError(f"{key} of the {self.name} is not finite; nothing is committed")
        return found

    def free(self) -> None:
        """Give the memory of weights and moments back, even if referenced elsewhere, as by DeepSpeed. Nothing
        of it can be used any more."""
        tensors = [part for one in self.held() for part in one.parts.values()]
        parameters = list(self.model.parameters())
        weights = [*parameters, *(p.ds_tensor for p in parameters if hasattr(p, "ds_tensor"))]
        for tensor in (*tensors, *weights):
            tensor.grad = None
            with contextlib.suppress(RuntimeError):  # memory that is not torch's own
                tensor.untyped_storage().resize_(0)
        for tensor in weights:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._optimizer.state.clear()

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that are trained, by name, in the same order on every rank."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def load_state(self, folder: Path) -> list[File]:
        """Restore what was saved of this trainer at any ZeRO stage and by any number of ranks. Each rank
        reads its part; every one takes part.

        Returns:
            The files that this rank read whole, with the hashes that they have: for the caller to compare.

        Raises:
            KeyError, OSError, ValueError: the folder lacks something of it. Where another rank found that,
                OSError.
        """
        verified: list[File] = []
        adapters: dict[str, Tensor] = {}
        error: Exception | None = None
        try:
            saved = SavedState(files_of(folder, self.name))
            verified = saved.read_into(self.held(), self.kinds)
            adapters = self._adapters_in(saved)
            counters = read_counters(folder, self.name)
        except (OSError, KeyError, ValueError) as found:
            error = found
        # before ranks do anything together, which one that failed would not
        if problem := ranks.first_of(None if error is None else f"{type(error).__name__}: {error}"):
            raise error or OSError(f"another rank failed, {problem}")
        for name, parameter in self.trained() if adapters else []:
            self.set_computed(parameter, adapters[name])
        self.set_counters(counters)
        return verified

    def _adapters_in(self, saved: SavedState) -> dict[str, Tensor]:
        """Return the whole weights of adapters, which are not in what the model was loaded from."""
        if not is_adapted(self.model):
            return {}
        found = {name: torch.empty(_shape(p), dtype=torch.float32) for name, p in self.trained()}
        for name, whole in found.items():
            saved.read(f"{WEIGHT}/{name}", 0, whole.view(-1))
        return found

    def set_computed(self, parameter: Tensor, whole: Tensor) -> None:
        """Set the weight that the model computes with. Every rank takes part."""
        from deepspeed.runtime.zero import GatheredParameters

        is_partitioned = self.config.zero == 3
        with torch.no_grad(), GatheredParameters([parameter], modifier_rank=0, enabled=is_partitioned):
            parameter.data.copy_(whole)

    def _master(self, parameter: Tensor) -> Tensor:
        """Return the whole weight, in fp32 if it is trained."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        if not parameter.requires_grad and self.config.zero == 3:
            with GatheredParameters([parameter]):
                return parameter.detach().clone()
        if not parameter.requires_grad or self.config.zero == 0:
            return parameter.detach()
        whole: Tensor = safe_get_full_fp32_param(parameter)
        return whole.view(_shape(parameter))

    def _optimized(self) -> list[Tensor]:
        """Return what AdamW steps: the parameters, or this rank's flat fp32 partitions of them."""
        if self.config.zero == 3:  # its parameter groups are empty between steps
            return list(self.engine.optimizer.fp32_partitioned_groups_flat)
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _step_count(self) -> Tensor | int:
        """Return the step count in the type that this AdamW takes."""
        return self.steps if self.config.offload_optimizer else torch.tensor(float(self.steps))

    def _make_optimizer_state(self) -> None:
        """Make moments, which a checkpoint must find; AdamW and DeepSpeed make them at the first step."""
        for tensor in self._optimized():
            moments = {moment: torch.zeros_like(tensor) for moment in MOMENTS}
            self._optimizer.state[tensor] = {"step": self._step_count(), **moments}
        if self.config.zero in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()


def _shape(parameter: Tensor) -> torch.Size:
    """Return the whole shape: ZeRO 3 leaves an empty tensor in place and keeps the shape beside it."""
    return getattr(parameter, "ds_shape", parameter.shape)
