"""How tensors of a model's files become its weights: in the smallest groups that are converted together.

Most weights lie in files as they are. Of some families transformers keeps several tensors of the files as one
weight, such as those of all experts of a layer, or several weights are one tensor there. Which these are is
asked of the transforms with which it has loaded the model; :mod:`.model_files` is the way back.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from pipeline.config.model_files import Tensor as Stored
from pipeline.config.model_files import Tensors
from stages.ppo.state.tensor_files import read_part


@dataclass(frozen=True)
class Piece:
    """One tensor of the files."""

    name: str
    pattern: str
    """Pattern of the transform under which it is collected."""
    stored: Stored


@dataclass(frozen=True)
class TensorSource:
    """Tensors of the files that become weights together."""

    name: str
    """Name of the weight that transformers calls the group by: its first."""
    dtype: torch.dtype
    """Format to which the tensors are rounded before anything else is done with them."""
    transform: WeightTransform
    pieces: tuple[Piece, ...]
    """In transformers' order."""

    def read(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Read the weights, by name, into the host's memory."""
        return self._convert(model, self._read)

    def names(self, model: PreTrainedModel) -> list[str] | None:
        """Return the names of the weights; None where they do not have the model's shapes, or where no such
        tensors can be read. Only shapes are computed."""
        wanted = model.state_dict()
        try:
            found = self._convert(model, self._described)
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError):
            return None
        fits = all(name in wanted and wanted[name].shape == tensor.shape for name, tensor in found.items())
        return list(found) if fits else None

    @torch.no_grad()
    def _convert(self, model: PreTrainedModel, get: Callable[[Stored], Tensor]) -> dict[str, Tensor]:
        transform = copy.deepcopy(self.transform)  # it collects tensors
        for piece in self.pieces:
            later = functools.partial(get, piece.stored)
            transform.add_tensor(self.name, piece.name, piece.pattern, later)  # type: ignore[arg-type]
        found = transform.convert(self.name, model=model, config=model.config)  # type: ignore[attr-defined]
        return {name: one[0] if isinstance(one, list) else one for name, one in found.items()}

    def _read(self, stored: Stored) -> Tensor:
        return read_part(stored).view(stored.shape).to(self.dtype)

    def _described(self, stored: Stored) -> Tensor:
        read_part(stored, 0, 0)  # raises KeyError where its format is unknown
        return torch.empty(stored.shape, dtype=self.dtype, device="meta")


def sources_of(model: PreTrainedModel, stored: Tensors) -> dict[str, TensorSource] | None:
    """Return what each weight of a model is made of, by the weight's name; None where that is not clear.

    Args:
        model: as transformers has loaded it from these files, if only to the meta device.
        stored: the tensors of the files.
    """
    found: dict[str, TensorSource] = {}
    for source in _groups(model, stored):
        names = source.names(model)
        if names is None or found.keys() & set(names):
            return None
        found |= dict.fromkeys(names, source)
    return found


def _groups(model: PreTrainedModel, stored: Tensors) -> Iterator[TensorSource]:
    """Yield the groups, as transformers' ``convert_and_load_state_dict_in_model`` collects them."""
    weights = model.state_dict()
    transforms = [_unused(one) for one in getattr(model, "_weight_conversions", None) or ()]
    by_pattern = {
        p: one for one in transforms if isinstance(one, WeightConverter) for p in one.source_patterns
    }
    together: dict[str, list[tuple[str, str | None]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = _renamed(key, transforms, model.base_model_prefix, weights)
        if name in weights:  # others are of no use to this model, such as the head of another class
            together.setdefault(name, []).append((key, pattern))
    for name, members in together.items():
        first, pattern = members[0]
        transform = WeightRenaming(first, name) if pattern is None else by_pattern[pattern]
        pieces = tuple(Piece(key, pattern or key, stored[key]) for key, pattern in members)
        yield TensorSource(name, weights[name].dtype, transform, pieces)


def _renamed(
    key: str, transforms: Sequence[WeightTransform], prefix: str, weights: dict[str, Tensor]
) -> tuple[str, str | None]:
    """Return the weight that a tensor of the files becomes (part of), and the pattern of what converts it."""
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    name, pattern = rename_source_key(key, renamings, converters, prefix, weights)
    if name not in weights and key in weights:
        name, pattern = rename_source_key(key, [], [], prefix, weights)
    return name, pattern


def _unused(transform: WeightTransform) -> WeightTransform:
    """Return a copy as it was before the model was loaded: some note which names they have seen."""
    copied = copy.deepcopy(transform)
    if hasattr(copied, "_active"):
        copied._active = False
    return copied
