"""Low-rank adapters as peft writes them: read from their files, and merged into a model's weights.

Needs no peft. Merging is done in fp32, weight by weight, and rounded to the format in which the policy was
trained: the same bytes in memory and on disk (:mod:`stages.models.merging`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from stages.context import UserError
from stages.files.policy import CannotAdapt

ADAPTER_FILE = "adapter_model.safetensors"
"""peft's name of the file of an adapter's weights."""
SETTINGS = "adapter_config.json"
PREFIX = "base_model.model."
"""Beginning of every tensor's name in an adapter's file."""
_ENDS = (".lora_A.weight", ".lora_B.weight")
_OTHERS = (
    *("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save"),
    *("layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens", "target_parameters"),
)
"""Settings of peft's with which an adapter is not merged as here."""


@dataclass(frozen=True)
class Adapter:
    """An adapter of some linear layers of a model."""

    factors: Mapping[str, tuple[Tensor, Tensor]]
    """Matrices of each adapted weight, by its name in the model: [r, in] that the layer's input is multiplied
    with, then [out, r]."""
    scaling: float
    is_transposed: bool
    """Whether the adapted weights are [in, out], as those of GPT-2 are."""

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return an adapted weight with the adapter merged into it, in fp32, where the weight is."""
        down, up = (factor.to(weight.device, torch.float32) for factor in self.factors[name])
        change = (up @ down) * self.scaling
        return weight.float() + (change.T if self.is_transposed else change)


def unmergeable(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings of an adapter with which it cannot be merged as here."""
    return [name for name in _OTHERS if settings.get(name)]


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of an adapter."""
    settings: dict[str, Any] = json.loads((folder / SETTINGS).read_text())
    return settings


def read_adapter(folder: Path) -> Adapter:
    """Read the adapter in ``folder``.

    Raises:
        UserError: a trainer of the user's wrote an adapter of another kind than is merged here.
    """
    settings, tensors = read_settings(folder), load_file(folder / ADAPTER_FILE)
    if kinds := unmergeable(settings):
        raise UserError(
            f"{folder}: adapters with {', '.join(kinds)} cannot be merged here; write whole models"
        )
    if strange := [name for name in tensors if not (name.startswith(PREFIX) and name.endswith(_ENDS))]:
        raise UserError(
            f"{folder}: its {strange[0]} is not a factor of a low-rank adapter; write whole models"
        )
    down, up = _ENDS
    modules = sorted(name.removesuffix(down) for name in tensors if name.endswith(down))
    return Adapter(
        {f"{m.removeprefix(PREFIX)}.weight": (tensors[m + down], tensors[m + up]) for m in modules},
        settings["lora_alpha"] / settings["r"],
        bool(settings.get("fan_in_fan_out")),
    )


@torch.no_grad()
def merge_into(model: nn.Module, adapter: Adapter) -> None:
    """Merge an adapter into the weights of a model, in place; they are rounded to the model's own format.

    Raises:
        CannotAdapt: some of the weights are not in memory.
        UserError: the model has no such weight.
    """
    weights = dict(model.named_parameters())
    if strange := [name for name in adapter.factors if name not in weights]:
        raise UserError(f"the adapter is for a model with a weight {strange[0]}, which this one lacks")
    if any(weights[name].is_meta for name in adapter.factors):
        raise CannotAdapt("some of its weights do not fit into memory")
    for name in adapter.factors:
        weights[name].copy_(adapter.merged(name, weights[name]))
