"""Adapters in vLLM: on their base, beside its weights, for every request of a task.

vLLM rounds an adapter to the model's number format, and adds what it computes to what the weights give: the
sum of both is not rounded, as a merged weight is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

import torch

from stages.engines.base import CannotAdapt
from stages.engines.layouts import Layout, layout_of
from stages.models.adapters import read_adapter, read_settings


@dataclass(frozen=True)
class Given:
    """All that vLLM was started for, but for numbers in weights."""

    layout: Layout | None
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

    vLLM passes over what it finds no place for, without a word, and would then generate with another policy.
    So what has arrived is counted.

    Args:
        ranks: processes that each weight is split over.

    Raises:
        CannotAdapt: vLLM refuses the adapter, or has no place for all of it.
    """
    factors = read_adapter(adapter).factors.values()
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
