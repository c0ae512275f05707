"""Low-rank adapters of the policy (arXiv 2106.09685), through peft.

The adapted model stays the transformers model that it was, with linear layers replaced in place; of its
parameters only the adapters' require gradients. Layers get one only if generation can merge or load it.
peft's layer has the old weights as ``base_layer``.
"""

import contextlib
import copy
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.config.schema import Config, ModelConfig
from pipeline.config.update import LoraConfig
from pipeline.run.paths import ADAPTER, BASE
from pipeline.run.seeds import derive_seed
from stages.context import UserError
from stages.logs import log
from stages.models.adapters import ADAPTER_FILE, PREFIX, expert_parameters, unmergeable
from stages.models.hidden import hide_unknown_ids
from stages.models.loading import WITHOUT_WEIGHTS, freeze_other_senses, load_causal_lm, without_weights
from stages.ppo.bare import looking_filled
from stages.ppo.zero import device_map_of

_KEY = "update.lora.target_modules"
_EXPERTS_KEY = "update.lora.target_parameters"
_PLAIN = ("Linear", "Conv1D")
"""Classes of layers that an adapter is merged into: they multiply their input with their weight."""
_NOT_CALLED = ("dt_proj",)
"""Layers of Mamba whose weight is read past them: an adapter would learn nothing."""


def check_targets(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Check layers that have no adapter yet.

    Raises:
        UserError: the model lacks a layer or weights that are named, or one of all its layers gives no single
            result.
    """
    known = expert_names(model)
    missing = [name for name in lora.target_parameters if name.rpartition(".")[2] not in known]
    if missing:
        has = f"it has {', '.join(known)}" if known else "no tensor of it holds weights of experts"
        raise UserError(f"{_EXPERTS_KEY}: the policy has no weights {missing[0]!r} of experts; {has}")
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


def expert_names(model: nn.Module) -> list[str]:
    """Return the names, without those of the modules around them, of the weights that hold all experts of a
    layer."""
    found = (expert_parameters(name, module, None) for name, module in model.named_modules())
    return sorted({key for one in found for key in one})


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
    """Check an adapter that is put on: for the names of layers peft also takes experts, whose weights are one
    tensor, in place of layers that have these names, and with ranks that cannot be merged.

    Args:
        settings: peft's settings of the adapter, which name what it was put into.

    Raises:
        UserError: it cannot be merged.
    """
    converted = set(settings.get("target_parameters") or ()) - set(lora.target_parameters)
    if not (converted or unmergeable(settings)):
        return
    left = {str(name).rpartition(".")[2] for name in settings.get("target_modules") or ()}
    what = f"peft takes experts of {type(model).__name__} for such layers, which cannot be merged"
    way_out = _way_out(sorted(left), expert_names(model))
    raise UserError(f"{_KEY}={_given(lora)}: {what}; {way_out}")


def _given(lora: LoraConfig) -> str:
    given = lora.target_modules
    return given if isinstance(given, str) else f"[{','.join(given)}]"


def _way_out(names: Collection[str], experts: Collection[str] = ()) -> str:
    """Return what to write instead, given the layers and weights of experts that are possible."""
    if not names:
        return "train all weights instead: update.lora=null"
    too = f" (and {_EXPERTS_KEY}=[{','.join(experts)}] for experts)" if experts else ""
    return f"give [{','.join(names)}]{too}, or train all weights: update.lora=null"


_NAME = "default"
"""peft's name of a model's only adapter."""
_ALL = "all-linear"
"""peft's word for every linear layer but the output layer."""


def load_policy(base: Path, config: Config) -> PreTrainedModel:
    """Load the policy of ``base``; where adapters are trained, with some that change nothing yet, the same
    each time and on every rank.

    Raises:
        UserError: peft is missing, or ``update.lora.target_modules`` does not fit the model.
    """
    update, trust = config.update, config.model.trust_remote_code
    model = load_causal_lm(base, update.precision, trust, device_map_of(update), update.attention)
    return adapt(hide_unknown_ids(model, config), base, config)


def adapt(model: PreTrainedModel, base: Path, config: Config) -> PreTrainedModel:
    """Put adapters into a policy, which may be without weights, if adapters are trained. What text does not
    go through is frozen in any case."""
    freeze_other_senses(model)
    if config.update.lora is not None:
        with looking_filled(model):
            attach(model, base, config.update.lora, derive_seed(config.seed, "lora"))
    return model


def check_fits(model: ModelConfig, config: LoraConfig) -> None:
    """Check that adapters can be put into the policy, by trying on the model without its weights.

    Raises:
        UserError: peft is missing, or ``update.lora.target_modules`` does not fit the model.
    """
    with torch.device(WITHOUT_WEIGHTS):
        bare = without_weights(model)
        attach(bare, Path(model.policy), config, seed=0)
    log.info(adapted_in_words(bare))


def attach(model: PreTrainedModel, base: Path, lora: LoraConfig, seed: int) -> None:
    """Put adapters into the model, whose directory is ``base``, and freeze everything else."""
    try:
        import peft
    except ImportError as error:
        raise UserError('update.lora needs peft: pip install "slurm-ppo[train]"') from error
    check_targets(model, lora)
    is_all = isinstance(lora.target_modules, str)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=_ALL if is_all else list(lora.target_modules),
        target_parameters=list(lora.target_parameters) or None,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
    )
    with torch.random.fork_rng(devices=[]), refusals_explained(model, lora):
        torch.default_generator.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model, _NAME)
    check_merges(model, vars(model.peft_config[_NAME]), lora)


def adapted_in_words(model: PreTrainedModel) -> str:
    """Return which share of its weights an adapted model has adapters for, and which experts have none."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    adapted = {getattr(m.get_base_layer(), getattr(m, "parameter_name", "weight")) for m in layers}
    own = {one for name, one in model.named_parameters() if ".lora_" not in name}
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    found = (expert_parameters(name, module, None) for name, module in model.named_modules())
    experts = {one for of_module in found for one in of_module.values()}
    rest = _share(experts - adapted, own)
    names = ",".join(expert_names(model))
    left = f"; experts, {rest:.0%}, have none ({_EXPERTS_KEY}=[{names}] adapts them)" if rest else ""
    return f"update.lora: {trained:,} weights adapt {_share(adapted, own):.1%} of the policy's{left}"


def _share(some: Iterable[Tensor], whole: Iterable[Tensor]) -> float:
    return sum(one.numel() for one in some) / sum(one.numel() for one in whole)


def is_adapted(model: PreTrainedModel) -> bool:
    return hasattr(model, "peft_config")


def save_policy(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write what a policy folder of an adapted model holds: the adapter, from its parameters by name, and a
    note that the model which it is for is policy 0."""
    save_adapter(model, weights, folder / ADAPTER)
    (folder / BASE).write_text(json.dumps({"policy_version": 0}) + "\n")


def save_adapter(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a directory for ``PeftModel.from_pretrained``, from the adapters' parameters by name."""
    folder.mkdir(parents=True)
    settings = copy.copy(model.peft_config[_NAME])
    settings.target_modules = sorted(settings.target_modules)  # a set is written in random order
    if settings.target_parameters:
        settings.target_parameters = sorted(settings.target_parameters)
    settings.inference_mode = True
    settings.save_pretrained(str(folder))
    tensors = {saved_name(name): weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})


def saved_name(name: str) -> str:
    """Return the name of an adapter's parameter in peft's files."""
    return PREFIX + name.replace(f".{_NAME}.", ".")
