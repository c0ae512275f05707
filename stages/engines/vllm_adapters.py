"""What vLLM has loaded, changed in place. Adapters: on their base, beside its weights, for every request of a
task.

vLLM rounds an adapter to the model's number format, and adds what it computes to what the weights give: the
sum of both is not rounded, as a merged weight is.

Whole weights it reloads layer by layer, and a layer that shares its weight with another (a head with the
embedding) gets nothing of its own. On CPUs it computes with a packed copy of that weight, which would be an
old one. What packs it again runs where the model is, in vLLM's workers.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from torch import nn

from stages.engines.base import CannotAdapt
from stages.engines.layouts import ModelLayout, layout_of
from stages.models.adapters import read_adapter, read_settings


@dataclass(frozen=True)
class Given:
    """All that vLLM was started for, but for numbers in weights."""

    layout: ModelLayout | None
    adapter: Mapping[str, Any] | None
    """Settings of the adapter; None where it has none, and takes none."""
    ranks: int
    """Processes that each weight is split over."""

    @staticmethod
    def of(directory: str, adapter: str | None, ranks: int) -> "Given":
        settings = None if adapter is None else read_settings(Path(adapter))
        return Given(layout_of(Path(directory)), settings, ranks)


class TakesAdapter(Protocol):
    """vLLM's engine, as it is used here."""

    def put_on(self, adapter: Path) -> list[int]:
        """Load an adapter; return of each worker how many weights it has changed."""


def adapter_arguments(adapter: Path) -> dict[str, Any]:
    """Return vLLM's EngineArgs with which it takes one adapter. Raises CannotAdapt for too large a rank."""
    from vllm.config.lora import MaxLoRARanks

    rank = int(read_settings(adapter)["r"])
    room = [most for most in sorted(get_args(MaxLoRARanks)) if most >= rank]
    if not room:
        raise CannotAdapt(f"vLLM takes no adapter of rank {rank}")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room[0]}


def put_on(engine: TakesAdapter, adapter: Path, ranks: int) -> None:
    """Put an adapter on the engine's model, for all its requests.

    vLLM silently skips what it finds no place for, and would then generate with another policy.
    So what has arrived is counted.

    Args:
        ranks: processes that each weight is split over.

    Raises:
        CannotAdapt: vLLM refuses the adapter, or has no place for all of it.
    """
    given = read_adapter(adapter)
    if given.of_experts:
        raise CannotAdapt("vLLM takes no adapter of experts' weights (update.lora.target_parameters)")
    factors = given.factors.values()
    wanted = sum(bool(up.count_nonzero()) for _, up in factors)  # those of zeros cannot be counted
    try:
        found = sum(engine.put_on(adapter))
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        raise CannotAdapt(f"vLLM refuses the adapter: {' '.join(str(error).split())}") from error
    if found != wanted * ranks:
        raise CannotAdapt(f"vLLM has put {found} of {wanted * ranks} parts of the adapter on the model")


def count_adapted(model: torch.nn.Module) -> int:
    """Count the weights of a worker's model that an adapter changes."""
    stacks = (getattr(module, "lora_b_stacked", ()) for module in model.modules())
    return sum(bool(part.count_nonzero()) for stack in stacks for part in stack)


_PACKED = "UnquantizedEmbeddingMethod"


def shared_weights(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each weight that has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, weight in model.named_parameters(remove_duplicate=False):
        names[id(weight)].append(name)
    return sorted(tuple(sorted(found)) for found in names.values() if len(found) > 1)


def pack_shared(model: nn.Module) -> None:
    """Pack again what layers compute with that share a weight.

    Raises:
        NotImplementedError: it is quantised, so that what the layer keeps of it is unknown.
    """
    for names in shared_weights(model):
        for name in names:
            layer = model.get_submodule(name.rpartition(".")[0])
            method = getattr(layer, "quant_method", None)
            if method is None or type(method).__name__ != _PACKED:
                raise NotImplementedError(f"{name} is shared and of {type(method).__name__}")
            method.process_weights_after_loading(layer)
