"""Which layers of a policy adapters can be put into, so that generation can merge or load what is trained."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pipeline.config.update import LoraConfig
from stages.context import UserError
from stages.models.adapters import unmergeable

_KEY = "update.lora.target_modules"
_PLAIN = ("Linear", "Conv1D")
"""Classes of layers that an adapter is merged into: they multiply their input with their weight."""
_NOT_CALLED = ("dt_proj",)
"""Layers of Mamba whose weight is read past them: an adapter would learn nothing."""


def check_targets(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Check layers that have no adapter yet.

    Raises:
        UserError: the model lacks a layer that is named, or one of all its layers gives no single result.
    """
    if not isinstance(lora.target_modules, str):
        _check_named(model, lora.target_modules)
    elif odd := next(_of_several_results(model), None):
        what = f"{odd} is a {type(model.get_submodule(odd)).__name__}, which no adapter can be added to"
        raise UserError(f"{_KEY}={lora.target_modules}: {what}; {_way_out(linear_names(model))}")


def linear_names(model: PreTrainedModel) -> list[str]:
    """Return the names, without those of the modules around them, of the layers that can have an adapter."""
    output = model.get_output_embeddings()
    modules = ((name, m) for name, m in model.named_modules() if m is not output)
    return sorted({name.rpartition(".")[2] for name, m in modules if type(m).__name__ in _PLAIN})


def _check_named(model: PreTrainedModel, targets: Collection[str]) -> None:
    """Raise UserError for a target that the model lacks; peft skips it silently if it finds another."""
    output = model.get_output_embeddings()
    modules = ((name, m) for name, m in model.named_modules() if m is not output)
    linear = [f".{name}" for name, m in modules if type(m).__name__ in _PLAIN]
    for target in targets:
        if not any(name.endswith(f".{target}") for name in linear):
            raise UserError(
                f"{_KEY}: the policy has no linear layer {target!r}; it has {', '.join(linear_names(model))} "
                "(the output layer cannot have an adapter)"
            )


@torch.no_grad()
def _of_several_results(model: nn.Module) -> Iterator[str]:
    """Yield names of linear layers that return more than their product, as some routers of experts do."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
            weight = module.weight
            row = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
            if not isinstance(module(row), torch.Tensor):
                yield name


@contextlib.contextmanager
def refusals_explained(model: PreTrainedModel, lora: LoraConfig) -> Iterator[None]:
    """Turn peft's refusal of a layer, as of those that Mamba's kernels read the weights of, into a UserError
    that says which layers are possible."""
    names, kind = linear_names(model), type(model).__name__
    try:
        yield
    except ValueError as error:
        said = " ".join(str(error).split())
        refused = [name for name in names if f"'{name}'" in said]
        what = f"peft puts no adapter into {', '.join(refused)} of {kind}" if refused else said
        others = [name for name in names if name not in (*refused, *_NOT_CALLED)] if refused else []
        raise UserError(f"{_KEY}={_given(lora)}: {what}; {_way_out(others)}") from error


def check_merges(model: PreTrainedModel, settings: Mapping[str, Any], lora: LoraConfig) -> None:
    """Check an adapter that is put on: peft takes experts, whose weights are one tensor, for layers too, and
    what it trains of them cannot be merged.

    Args:
        settings: peft's settings of the adapter, which name what it was put into.

    Raises:
        UserError: it cannot be merged.
    """
    if not (others := unmergeable(settings)):
        return
    experts = ", ".join(sorted(settings.get("target_parameters") or others))
    left = {str(name).rpartition(".")[2] for name in settings.get("target_modules") or ()}
    what = f"peft adapts the experts of {type(model).__name__} too ({experts}), which cannot be merged"
    raise UserError(f"{_KEY}={_given(lora)}: {what}; {_way_out(sorted(left))}")


def _given(lora: LoraConfig) -> str:
    given = lora.target_modules
    return given if isinstance(given, str) else f"[{','.join(given)}]"


def _way_out(names: Collection[str]) -> str:
    """Return what to write instead, given the layers that are possible."""
    if not names:
        return "train all weights instead: update.lora=null"
    return f"give [{','.join(names)}], or train all weights: update.lora=null"
