"""Low-rank adapters as peft writes them: read from their files, and merged into a model's weights.

Adapters of experts lie around the module that holds their weights, one around the other, the innermost of the
weight that the module has first. Which weights these are, the model says, and ``target_parameters``.

Needs no peft. Merging is done in fp32, weight by weight, and rounded to the format in which the policy was
trained: the same bytes in memory and on disk (:mod:`stages.models.merging`).
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
_AROUND = ".base_layer"
"""Ending of the name of what an adapter is around."""
_ENDS = (".lora_A.weight", ".lora_B.weight")
_OTHERS = (
    *("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save"),
    *("layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens"),
)
"""Settings of peft's with which an adapter is not merged as here."""


Factors = tuple[Tensor, Tensor]
"""What a layer's input is multiplied with, and then that."""


@dataclass(frozen=True)
class Adapter:
    """An adapter of some linear layers of a model, and of some of its experts."""

    factors: Mapping[str, Factors]
    """Matrices of each adapted weight, by its name in the model: [r, in] that the layer's input is multiplied
    with, then [out, r]."""
    scaling: float
    is_transposed: bool
    """Whether the adapted weights are [in, out], as those of GPT-2 are."""
    of_experts: Mapping[str, Sequence[Factors]] = field(default_factory=dict)
    """Matrices of each adapted weight of E experts, by the name of its module, in the module's order:
    [E x r, in], expert by expert, then [out, r x E], rank by rank."""
    parameters: tuple[str, ...] = ()
    """Ends of the names of these weights."""

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return an adapted weight with the adapter merged into it, in fp32, where the weight is."""
        down, up = (factor.to(weight.device, torch.float32) for factor in self.factors[name])
        change = (up @ down) * self.scaling
        return weight.float() + (change.T if self.is_transposed else change)

    def merged_experts(self, factors: Factors, weight: Tensor, is_transposed: bool) -> Tensor:
        """Return a weight [E, out, in] of experts, or [E, in, out], with the adapter merged into it, in
        fp32."""
        down, up = (factor.to(weight.device, torch.float32) for factor in factors)
        experts = len(weight)
        downs, ups = down.reshape(experts, -1, down.shape[1]), up.reshape(len(up), -1, experts)
        change = torch.einsum("ore,eri->eoi", ups, downs) * self.scaling
        return weight.float() + (change.transpose(1, 2) if is_transposed else change)

    def expert_weights(self, model: nn.Module) -> Iterator[tuple[Tensor, Factors, bool]]:
        """Yield the adapted weights of a model's experts, their factors, and whether they are [E, in, out].

        Raises:
            UserError: the model has no such weights.
        """
        modules = dict(model.named_modules())
        for name, factors in self.of_experts.items():
            weights = expert_parameters(name, modules[name], self.parameters) if name in modules else {}
            if len(weights) != len(factors):
                raise UserError(f"the adapter is for a model with experts {name}, which this one lacks")
            is_transposed = bool(getattr(modules[name], "is_transposed", False))
            for weight, pair in zip(weights.values(), factors, strict=True):
                yield weight, pair, is_transposed


def expert_parameters(
    name: str, module: nn.Module, targets: Collection[str] | None
) -> dict[str, nn.Parameter]:
    """Return the weights of experts that a module has, in its order: tensors [E, ., .] with names of their
    own, unlike the weight of a convolution.

    Args:
        targets: ends of the names of those that are wanted. Default: all.
    """
    own = ((key, one) for key, one in module.named_parameters(recurse=False) if key != "weight")
    shapes = ((key, one, getattr(one, "ds_shape", one.shape)) for key, one in own)
    ends = ("",) if targets is None else tuple(f".{target}" for target in targets)
    return {key: one for key, one, shape in shapes if len(shape) == 3 and f".{name}.{key}".endswith(ends)}


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
    pairs = {m.removeprefix(PREFIX): (tensors[m + down], tensors[m + up]) for m in modules}
    linear = {name for name, (first, _) in pairs.items() if len(first) == settings["r"]}
    of_experts: dict[str, list[Factors]] = {}
    for name in sorted(pairs.keys() - linear, key=len, reverse=True):  # the innermost first
        of_experts.setdefault(name.replace(_AROUND, ""), []).append(pairs[name])
    return Adapter(
        {f"{name}.weight": pairs[name] for name in pairs if name in linear},
        settings["lora_alpha"] / settings["r"],
        bool(settings.get("fan_in_fan_out")),
        {name: of_experts[name] for name in sorted(of_experts)},
        tuple(sorted(settings.get("target_parameters") or ())),
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
    experts = list(adapter.expert_weights(model))
    if any(one.is_meta for one in (*(weights[name] for name in adapter.factors), *(e for e, *_ in experts))):
        raise CannotAdapt("some of its weights do not fit into memory")
    for name in adapter.factors:
        weights[name].copy_(adapter.merged(name, weights[name]))
    for weight, factors, is_transposed in experts:
        weight.copy_(adapter.merged_experts(factors, weight, is_transposed))
