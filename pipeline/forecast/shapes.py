"""The size of a model, by its config.json and the headers of its weight files."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.issue import ConfigError
from pipeline.config.model_files import (
    INDEX,
    WEIGHTS,
    BadModel,
    Tensor,
    read_header,
    read_json,
    read_tensors,
    text_settings,
)
from pipeline.config.trainable import quantisation_of
from pipeline.config.update import LoraConfig

_OUTPUTS = ("lm_head.weight", "embed_out.weight", "output.weight")
"""Names of the output layer where it is not the embeddings."""
_GATED = ("gate_proj", "gate_up_proj", ".w3.", "gate_and_up")
"""Parts of the names of weights of gated feed-forward layers."""
_EXPERTS = ".experts."
"""Part of the names of weights of experts, of each or of all in one tensor."""
_COMPUTED = ("F64", "F32", "F16", "BF16")
"""Formats of numbers that become those of the engine as they are loaded."""
_OF_A_BYTE = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8")
"""Formats of quantised weights of a byte each. Others are of scales, or have several weights in one."""


@dataclass(frozen=True)
class ModelShape:
    """A model's size. Widths are numbers of each token."""

    parameters: int
    """Weights, but for those in :attr:`packed`."""
    layers: int
    hidden: int
    inner: int
    """Width inside the feed-forward layer, of all experts that one token goes through."""
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    """Rows of the output layer; 0 for a model that gives one number."""
    is_gated: bool = True
    """Whether the feed-forward layer multiplies two inner activations."""
    largest: int = 0
    """Numbers of the largest weight."""
    adapted: int = 0
    """Parameters of adapters that are trained instead of the model's own."""
    bytes_each: int = 0
    """Parameters that are quantised to a byte each, such as FP8."""
    packed: int = 0
    """Bytes of weights of which less than a byte is one, such as GPTQ's."""

    @property
    def trained(self) -> int:
        """Parameters that have gradients."""
        return self.adapted or self.parameters

    def as_stored(self, width: int) -> int:
        """Return the bytes of the weights where quantised ones stay so, as in vLLM; others have ``width``
        each."""
        return (self.parameters - self.bytes_each) * width + self.bytes_each + self.packed

    def dequantised(self, width: int) -> int:
        """Return the bytes of the weights with ``width`` for each that is not packed, as transformers has
        them without a GPU that computes in FP8."""
        return self.parameters * width + self.packed

    @property
    def queries(self) -> int:
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        return self.key_heads * self.head_size


def read_shape(directory: Path, gives_number: bool = False, lora: LoraConfig | None = None) -> ModelShape:
    """Read a model's size.

    Args:
        gives_number: whether it is used as a critic or reward model, without its output layer.
        lora: adapters that it gets.

    Raises:
        ConfigError: its files cannot be read, or its config.json lacks a size.
    """
    settings, tensors = text_settings(directory), dict(_tensors(directory))
    if gives_number:
        tensors = {name: one for name, one in tensors.items() if name not in _OUTPUTS}
    hidden, heads = _number(settings, "hidden_size", "n_embd", "d_model"), _heads(settings)
    if not tensors:
        raise ConfigError(f"{directory} has no weights in safetensors")
    if not hidden:
        raise ConfigError(f"{directory}: its config.json names no hidden_size")
    whole = tensors.values()
    of_a_byte, packed = _quantised(directory, whole)
    return ModelShape(
        parameters=_count(whole) - _count(packed),
        layers=_number(settings, "num_hidden_layers", "n_layer", "num_layers"),
        hidden=hidden,
        inner=_inner(settings) or 4 * hidden,
        heads=heads,
        key_heads=_number(settings, "num_key_value_heads") or heads,
        head_size=_number(settings, "head_dim") or hidden // heads,
        vocabulary=0 if gives_number else _number(settings, "vocab_size"),
        is_gated=any(part in name for name in tensors for part in _GATED),
        largest=max(math.prod(tensor.shape) for tensor in whole),
        adapted=num_adapted(directory, lora) if lora else 0,
        bytes_each=_count(of_a_byte),
        packed=sum(one.size for one in packed),
    )


def _quantised(directory: Path, tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return those weights of a quantised model that have a byte each, and what is packed. Without a word in
    config.json every engine converts all of them to its own format."""
    if quantisation_of(read_json(directory / "config.json") or {}) is None:
        return [], []
    found = [one for one in tensors if one.dtype not in _COMPUTED]
    packed = [one for one in found if one.dtype not in _OF_A_BYTE]
    return [one for one in found if one.dtype in _OF_A_BYTE], packed


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _heads(settings: Mapping[str, Any]) -> int:
    return _number(settings, "num_attention_heads", "n_head", "num_heads") or 1


def _inner(settings: Mapping[str, Any]) -> int:
    experts = _number(settings, "num_experts_per_tok")
    if experts:
        return experts * _number(settings, "moe_intermediate_size", "intermediate_size")
    return _number(settings, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")


def _number(settings: Mapping[str, Any], *names: str) -> int:
    """Return the first of some settings that is a number; 0 where none is."""
    return next((value for name in names if isinstance(value := settings.get(name), int)), 0)


def num_parameters(folder: Path) -> int:
    """Count the parameters in a model directory, by the headers of its weight files. Raises ConfigError."""
    return _count(tensor for _, tensor in _tensors(folder))


def num_adapted(folder: Path, lora: LoraConfig) -> int:
    """Count the parameters of low-rank adapters, one for each matrix of a numbered layer that
    ``target_modules`` names, and for each of every expert where any is named in ``target_parameters``. Raises
    ConfigError."""
    wanted = lora.target_modules
    ends = ("",) if isinstance(wanted, str) else tuple(f".{target}" for target in wanted)
    total = 0
    for name, tensor in _tensors(folder):
        module = f".{name.removesuffix('.weight')}"
        if _EXPERTS in module:
            is_adapted = bool(lora.target_parameters) and not module.endswith("bias")
        else:
            is_numbered = any(part.isdigit() for part in module.split("."))
            is_adapted = len(tensor.shape) == 2 and is_numbered and module.endswith(ends)
        if is_adapted:
            total += math.prod(tensor.shape[:-2]) * lora.rank * sum(tensor.shape[-2:])
    return total


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    is_standard = (folder / WEIGHTS).is_file() or (folder / INDEX).is_file()
    try:
        if is_standard:
            yield from read_tensors(folder).items()
        for file in () if is_standard else sorted(folder.glob("*.safetensors")):  # of a user's engine
            yield from read_header(file).items()
    except BadModel as error:
        raise ConfigError(f"{folder} {error}") from error
