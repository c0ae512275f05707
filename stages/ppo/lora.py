"""Low-rank adapters of the policy (arXiv 2106.09685), through peft.

The adapted model stays the transformers model that it was, with linear layers replaced in place; of its
parameters only the adapters' require gradients. peft's layer has the old weights as ``base_layer``.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pipeline.config.schema import Config, ModelConfig
from pipeline.config.update import LoraConfig
from pipeline.run.paths import ADAPTER, BASE
from pipeline.run.seeds import derive_seed
from stages.context import UserError
from stages.models.adapters import ADAPTER_FILE, PREFIX
from stages.models.hidden import hide_unknown_ids
from stages.models.loading import freeze_other_senses, load_causal_lm
from stages.ppo.adaptable import check_merges, check_targets, refusals_explained
from stages.ppo.bare import looking_filled
from stages.ppo.zero import device_map_of

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
        raise UserError('update.lora needs peft: pip install "slurm-ppo[train]"') from error
    check_targets(model, lora)
    is_all = isinstance(lora.target_modules, str)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=_ALL if is_all else list(lora.target_modules),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
    )
    with torch.random.fork_rng(devices=[]), refusals_explained(model, lora):
        torch.default_generator.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model, _NAME)
    check_merges(model, vars(model.peft_config[_NAME]), lora)


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
    settings.inference_mode = True
    settings.save_pretrained(str(folder))
    tensors = {saved_name(name): weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})


def saved_name(name: str) -> str:
    """Return the name of an adapter's parameter in peft's files."""
    return PREFIX + name.replace(f".{_NAME}.", ".")
