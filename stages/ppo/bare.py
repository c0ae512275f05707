"""Models without weights, which are then read one at a time while ZeRO 3 shares them out: no rank ever holds
all of them, neither on its device nor in its host's memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.config.model_files import Tensors, read_tensors
from stages import ranks
from stages.models import device
from stages.ppo.state.tensor_files import read_part


@dataclass(frozen=True)
class Bare:
    """A model on torch's meta device, and where its weights are."""

    model: PreTrainedModel
    stored: Tensors
    """By the parameters' names."""


def bare_model(load: Callable[[str], PreTrainedModel], directory: Path) -> Bare | None:
    """Return a directory's model without its weights, but with its buffers.

    None where transformers would convert weights, so that files have others than the model, or where buffers
    cannot be made alone.

    Args:
        load: loads the model to a device.
    """
    stored = read_tensors(directory)
    model = load("meta")
    fits = all(name in stored and stored[name].shape == p.shape for name, p in model.named_parameters())
    return Bare(model, stored) if fits and _fill_buffers(model, stored) else None


def _fill_buffers(model: PreTrainedModel, stored: Tensors) -> bool:
    """Give the model its buffers, from files or as it makes them itself. Returns whether it has them all."""
    made: list[Tensor] = []
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            if full_name in stored:
                value = read_part(stored[full_name]).view(buffer.shape).to(buffer.dtype)
            elif buffer.is_floating_point():
                value = torch.full_like(buffer, torch.nan, device="cpu")
                module._is_hf_initialized = False
                made.append(value)
            else:
                return False
            module._buffers[name] = value
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()
    return not any(bool(value.isnan().any()) for value in made)


def filled(bare: Bare) -> Iterator[nn.Parameter]:
    """Give the model its weights, one at a time, on the device: the first rank's, which others are sent.

    Each is to be shared out before the next is asked for.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in bare.model.modules():
        for key, parameter in module._parameters.items():
            places.setdefault(id(parameter), []).append((module, key))
    for name, empty in list(bare.model.named_parameters()):
        weight = torch.empty(empty.shape, dtype=empty.dtype, device=device())
        if ranks.is_first():
            weight.copy_(read_part(bare.stored[name]).view(empty.shape))
        parameter = nn.Parameter(weight, requires_grad=empty.requires_grad)
        for module, key in places[id(empty)]:
            module._parameters[key] = parameter
        yield parameter
