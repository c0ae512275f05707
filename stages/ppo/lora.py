"""Low-rank adapters of the policy (arXiv 2106.09685), through peft.

The adapted model stays the transformers model that it was, with linear layers replaced in place; of its
parameters only the adapters' require gradients. peft's layer has the old weights as ``base_layer``.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pipeline.config.schema import Config, ModelConfig
from pipeline.config.update import LoraConfig
from pipeline.run.seeds import derive_seed
from stages.context import UserError
from stages.models import load_causal_lm
from stages.ppo.zero import device_map_of

_NAME = "default"
"""peft's name of a model's only adapter."""
_LAYER = ".base_layer"
ADAPTER_FILE = "adapter_model.safetensors"
"""peft's name of the file of an adapter's weights."""


def load_policy(base: Path, config: Config) -> PreTrainedModel:
    """Load the policy of ``base``; where adapters are trained, with some that change nothing yet, the same
    each time and on every rank.

    Raises:
        UserError: peft is missing, or ``update.lora.target_modules`` does not fit the model.
    """
    update, trust = config.update, config.model.trust_remote_code
    model = load_causal_lm(base, update.precision, trust, device_map_of(update), update.attention)
    if update.lora is not None:
        attach(model, base, update.lora, derive_seed(config.seed, "lora"))
    return model


def check_fits(model: ModelConfig, config: LoraConfig) -> None:
    """Check that adapters can be put into the policy, by trying on the model without its weights.

    Raises:
        UserError: peft is missing, or ``update.lora.target_modules`` does not fit the model.
    """
    trust = model.trust_remote_code
    described = AutoConfig.from_pretrained(model.policy, local_files_only=True, trust_remote_code=trust)
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(described, trust_remote_code=trust)
        attach(bare, Path(model.policy), config, seed=0)


def attach(model: PreTrainedModel, base: Path, lora: LoraConfig, seed: int) -> None:
    """Put adapters into the model, whose directory is ``base``, and freeze everything else."""
    try:
        import peft
    except ImportError as error:
        raise UserError('update.lora needs peft: pip install "slurm-ppo[lora]"') from error
    targets: str | list[str] = "all-linear"
    if not isinstance(lora.target_modules, str):
        _check_targets(model, lora.target_modules)
        targets = list(lora.target_modules)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model, _NAME)


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Raise UserError for a target that the model lacks; peft skips it silently if it finds another."""
    output = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and module is not output
    ]
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in linear):
            known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linear}))
            raise UserError(
                f"update.lora.target_modules: the policy has no linear layer {target!r}; it has {known} (the "
                "output layer cannot have an adapter)"
            )


def is_adapted(model: PreTrainedModel) -> bool:
    return hasattr(model, "peft_config")


def is_adapter(name: str) -> bool:
    """Whether this is the name of an adapter's parameter."""
    return f".{_NAME}." in name


def plain_name(name: str) -> str:
    """Return the name that a weight or buffer of an adapted model has without adapters."""
    return name.replace(f"{_LAYER}.", ".")


def adapted_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return peft's layers by the name of the weight that they adapt. Empty for a model without adapters."""
    return {
        f"{name}{_LAYER}.weight": module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and _NAME in module.lora_A
    }


def factors(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the matrices that an adapter's input is multiplied with, first [r, in], then [out, r]."""
    return layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight


def merged(layer: Any, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return the layer's weight with its adapter merged, in fp32, from its whole weight and factors."""
    change = (up.float() @ down.float()) * layer.scaling[_NAME]
    return weight.float() + (change.T if layer.fan_in_fan_out else change)


def save_adapter(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a directory for ``PeftModel.from_pretrained``, from the adapters' parameters by name."""
    folder.mkdir(parents=True)
    settings = copy.copy(model.peft_config[_NAME])
    settings.target_modules = sorted(settings.target_modules)  # a set is written in random order
    settings.inference_mode = True
    settings.save_pretrained(str(folder))
    tensors = {saved_name(name): weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})


def saved_name(name: str) -> str:
    """Return the name of an adapter's parameter in peft's files."""
    return "base_model.model." + name.replace(f".{_NAME}.", ".")
