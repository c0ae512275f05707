"""Models of transformers that are used again: other weights put into them, and what use leaves behind undone.

The bytes that follow are those of a model that was loaded just now. So a tensor is read as transformers reads
it, with the same number format, place in memory and device, and replaces that of the model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.config.model_files import read_tensors
from stages.engines.layouts import ModelLayout

_PLAIN = (bool, int, float, str, type(None))


def can_take(model: PreTrainedModel, layout: ModelLayout) -> bool:
    """Whether a model is made of its directory's tensors as they are, so that others may take their place.

    Not where transformers splits, joins, renames or quantises tensors while it loads them, or leaves them on
    a disk.
    """
    places = tensors_of(model)
    is_plain = getattr(model, "_weight_conversions", None) == [] and not getattr(model, "hf_quantizer", None)
    if not is_plain or any(tensor.is_meta for tensor in places.values()):
        return False
    stored = {id(places[name]) for name in layout.tensors if name in places}
    is_each_its_own = len(stored) == len(layout.tensors)  # else two names are tied, or one is unknown
    fits = all(
        tuple(places[name].shape) == shape for name, (_, shape) in layout.tensors.items() if name in places
    )
    return is_each_its_own and fits and stored == {id(tensor) for tensor in places.values()}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers by all their names; tied ones are the same object."""
    saved = model.state_dict().keys()
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in named if name in saved}


@torch.no_grad()
def load_in_place(model: nn.Module, directory: Path) -> None:
    """Put the weights of a directory into a model that :func:`can_take` them."""
    places, headers = tensors_of(model), read_tensors(directory)
    ordered = sorted(headers, key=lambda name: (headers[name].path, headers[name].start))
    for path, names in groupby(ordered, key=lambda name: headers[name].path):
        with safe_open(path, "pt") as file:
            for name in names:
                place = places[name]
                place.data = file.get_slice(name)[...].to(device=place.device, dtype=place.dtype)


@dataclass(frozen=True)
class Unused:
    """State of a model that was never used, besides its weights. Some models compute numbers for the longest
    sequence so far, and keep them."""

    plain: Mapping[nn.Module, Mapping[str, Any]]
    """Attributes of each module that are numbers, texts, flags."""
    buffers: Mapping[nn.Module, Mapping[str, Tensor]]
    """Copies of the buffers of numbers that are not saved with the weights."""

    @staticmethod
    def of(model: nn.Module) -> "Unused":
        modules = list(model.modules())
        buffers = {module: dict(_own_buffers(module)) for module in modules}
        return Unused({module: _plain(module) for module in modules}, buffers)

    def restore(self) -> None:
        """Make the model as it was."""
        for module, values in self.plain.items():
            vars(module).update(values)
        for module, copies in self.buffers.items():
            for name, copy in copies.items():
                module.register_buffer(name, copy.clone(), persistent=False)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}


def _own_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in module.named_buffers(recurse=False):
        if name in module._non_persistent_buffers_set and buffer.is_floating_point():
            yield name, buffer.clone()
