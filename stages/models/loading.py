"""Loading Hugging Face models from directories: safetensors only, no hub.

With ``device_map="meta"`` a model is made of its files' headers, and no weight is read.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.utils import logging

from pipeline.config.model_classes import scoring_class
from pipeline.config.model_files import read_json
from pipeline.config.schema import ModelConfig
from pipeline.config.trainable import OTHER_SENSES, drafting_layers, quantisation_of
from pipeline.config.update import Precision
from pipeline.run.cards import format_problems, missing_code
from pipeline.run.gpus import ask_nvml
from stages.context import UserError
from stages.logs import log
from stages.models.devices import device

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}


_RATE = re.compile(r"dropout|pdrop$")
"""Names under which layers keep the rate of a dropout that they compute themselves."""
_PARTS = {"text_config", "vision_config", "audio_config"}
"""Parts of the configuration of a model that takes more than text."""
_LEFT_OUT = re.compile(
    rf"{OTHER_SENSES.pattern}|(^|\.)mtp|(^|\.)pooler\.|att(n|ention)\.(masked_)?bias$|"
    r"(causal_mask|inv_freq|position_ids|embed_positions\.weights)$|\bseq_relationship\."
)
"""Names of weights that make no difference to what is computed: of other senses, of the prediction of more
tokens and of the next sentence, of a text's first token, and constants that earlier versions stored."""


def check_gpus_are_seen(environment: Mapping[str, str]) -> None:
    """Check that the GPUs which the task was given are there. Which ones it may use is never changed.

    Raises:
        UserError: none of them is: the stage would compute on the CPU, for days.
    """
    given = environment.get("CUDA_VISIBLE_DEVICES", "")
    is_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    if problem := missing_gpus(given, is_for_gpus, torch.cuda.is_available()):
        reason = ask_nvml()
        raise UserError(f"{problem} ({reason})" if reason else problem)
    if given and not is_for_gpus:
        log.warning(f"CUDA_VISIBLE_DEVICES={given}, but torch is built for CPUs here: computing on them")


def missing_gpus(given: str, is_for_gpus: bool, is_any_seen: bool) -> str | None:
    """Return what is wrong when a task was given GPUs and sees none; else None.

    Args:
        given: CUDA_VISIBLE_DEVICES; the values that Slurm writes for a job without GPUs name none.
        is_for_gpus: whether torch is built for GPUs.
    """
    if given in ("", "-1", "NoDevFiles") or is_any_seen or not is_for_gpus:
        return None
    return (
        f"CUDA_VISIBLE_DEVICES={given}: none of these GPUs can be used on this node; look at nvidia-smi "
        "there, and at what the job asked for (scheduler.STAGE.gpus_per_node)"
    )


WITHOUT_WEIGHTS = "meta"
"""torch's device for tensors that have a shape and no numbers."""


def placement(device_map: str | None, precision: Precision) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that say where weights go: by default straight to the GPU,
    where there is one, so that the host's memory never holds them all. On CPUs there are none.

    The GPU is named by the number that this process uses: for "cuda" transformers takes LOCAL_RANK's, which
    is another one where a launcher shows each rank its own GPU only.

    Raises:
        UserError: the GPU does not compute in this precision, or torch is not built for it.
    """
    if device().type == "cuda" and device_map != WITHOUT_WEIGHTS:
        check_card(precision)
        if device_map is None:
            return {"device_map": torch.device("cuda", torch.cuda.current_device())}
    return {"device_map": device_map} if device_map else {}


def check_card(precision: Precision, key: str = "precision") -> None:
    """Check that this process's GPU can compute with a model of this precision. Opens the driver.

    Args:
        key: of the configuration, that chooses the precision.

    Raises:
        UserError: it cannot; says what can.
    """
    if torch.version.hip:
        return
    capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    build = f"{torch.__version__} (CUDA {torch.version.cuda})"
    if problem := missing_code(name, capability, build, torch.cuda.get_arch_list()):
        raise UserError(problem)
    for issue in format_problems({key: precision}, capability, "here"):
        raise UserError(f"{name}: {issue}")


def load_causal_lm(
    directory: str | Path,
    precision: Precision,
    trust_remote_code: bool,
    device_map: str | None = None,
    attention: str | None = None,
) -> PreTrainedModel:
    """Load a policy or reference model. For ``attention`` see :class:`UpdateConfig`."""
    return _load(AutoModelForCausalLM, directory, precision, trust_remote_code, device_map, attention)


def without_weights(model: ModelConfig) -> PreTrainedModel:
    """Make the policy as its config.json describes it; none of its files of weights is looked at."""
    trust = model.trust_remote_code
    described = AutoConfig.from_pretrained(model.policy, local_files_only=True, trust_remote_code=trust)
    with torch.device(WITHOUT_WEIGHTS):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(described, trust_remote_code=trust)
    return made


def load_reward_model(
    directory: str | Path, precision: Precision, trust_remote_code: bool, device_map: str | None = None
) -> PreTrainedModel:
    """Load a sequence-classification model. Raises UserError when it has not exactly one output."""
    model = _load(AutoModelForSequenceClassification, directory, precision, trust_remote_code, device_map)
    if model.config.num_labels != 1:
        raise UserError(f"{directory} has {model.config.num_labels} outputs; a reward model has 1")
    return model


def load_step_model(
    directory: str | Path, precision: Precision, trust_remote_code: bool, device_map: str | None = None
) -> PreTrainedModel:
    """Load a reward model that scores steps: a token-classification model, or one that scores sequences by a
    head ``score`` that reads one token. Raises UserError when it has no such head."""
    auto_class = getattr(transformers, scoring_class(read_json(Path(directory) / "config.json") or {}, True))
    model = _load(auto_class, directory, precision, trust_remote_code, device_map)
    if auto_class is AutoModelForSequenceClassification and not hasattr(model, "score"):
        raise UserError(f"{directory} has no head that scores each token (score), only one for sequences")
    return model


def _load(
    auto_class: Any,
    directory: str | Path,
    precision: Precision,
    trust: bool,
    device_map: str | None,
    attention: str | None = None,
) -> PreTrainedModel:
    arguments = load_arguments(directory, precision, trust) | placement(device_map, precision)
    model, differing = load_with_attention(auto_class, directory, attention, arguments)
    check_missing(directory, model, differing.missing)
    if not quantisation_of(arguments["config"].to_dict()):  # such files hold scales too
        check_used(directory, model, differing.unused, [*_parts_of(model), *_parts_of(model.base_model)])
    model.eval()
    return model if device_map else model.to(device())  # type: ignore[arg-type]


@dataclass(frozen=True)
class Differing:
    """The names of weights in which a directory and a model's class differ."""

    missing: frozenset[str]
    """Weights of the class that the directory lacks."""
    unused: frozenset[str]
    """Weights of the directory that the class has no use for, but those that transformers knows of."""


def check_missing(directory: str | Path, model: PreTrainedModel, keys: Iterable[str]) -> None:
    """Raise UserError if there are ``keys``: names of weights that the directory lacks."""
    if missing := sorted(keys):
        raise UserError(
            f"{directory} lacks weights of {type(model).__name__}: {_some(missing)}; they would be random "
            "numbers: copy the model again"
        )


def check_used(
    directory: str | Path, model: PreTrainedModel, keys: Collection[str], parts: Collection[str]
) -> None:
    """Raise UserError if one of ``keys``, names of weights that were not loaded, is of the backbone or of one
    of ``parts``: what is computed would be another model. Heads of other uses may be left out."""
    prefix, drafting = f"{model.base_model_prefix}.", drafting_layers(keys)
    ours = (key for key in keys if key.startswith(prefix) or key.split(".")[0] in parts)
    if left_out := sorted(k for k in ours if not _LEFT_OUT.search(k) and not k.startswith(drafting)):
        raise UserError(
            f"{directory} has weights that {type(model).__name__} leaves out by its config.json: "
            f"{_some(left_out)}; it is not the configuration of these weights: copy it again from where they "
            "are from"
        )


def _parts_of(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_children()]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def load_with_attention(
    auto_class: Any, directory: str | Path, attention: str | None, arguments: dict[str, Any]
) -> tuple[PreTrainedModel, Differing]:
    """Return the model, and the names of weights that it or the directory lacks.

    Raises:
        UserError: it cannot be had with this attention, or its weights have other shapes than config.json
            says.
    """
    if attention is None:
        return _loaded(auto_class, directory, arguments)
    try:
        return _loaded(auto_class, directory, arguments | {"attn_implementation": attention})
    except (ValueError, ImportError) as error:
        raise UserError(
            f"update.attention={attention}: {directory} cannot be loaded with it ({error}); leave it out for "
            "the model's own, or try sdpa or eager"
        ) from error


def _loaded(
    auto_class: Any, directory: str | Path, arguments: dict[str, Any]
) -> tuple[PreTrainedModel, Differing]:
    wanted_verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # no table of missing and unexpected weights: the callers judge those
    try:
        model, loading = auto_class.from_pretrained(
            str(directory), output_loading_info=True, ignore_mismatched_sizes=True, **arguments
        )
    finally:
        logging.set_verbosity(wanted_verbosity)
    for name, found, wanted in sorted(loading["mismatched_keys"]):
        raise UserError(
            f"{directory}: its weight {name} has shape {list(found)}, and by its config.json "
            f"{type(model).__name__} wants {list(wanted)}; copy both again from the same place"
        )
    return model, Differing(frozenset(loading["missing_keys"]), frozenset(loading["unexpected_keys"]))


def load_arguments(directory: str | Path, precision: Precision, trust_remote_code: bool) -> dict[str, Any]:
    common = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(str(directory), **common)
    return {**common, "config": config, "dtype": DTYPES[precision], "use_safetensors": True}


def freeze_other_senses(model: PreTrainedModel) -> None:
    """Freeze the weights of a policy that only images or sound go through: they have no gradient, but weight
    decay would change them all the same."""
    if not _PARTS & getattr(model.config, "sub_configs", {}).keys():
        return
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    of_text = {id(p) for part in parts if part is not None for p in part.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in of_text or OTHER_SENSES.search(name):
            parameter.requires_grad_(False)


def switch_off_chance(model: nn.Module) -> None:
    """Put a model that is trained into evaluation mode: dropout, jitter in routers and whatever else draws
    random numbers would make old and new log-probabilities of the same weights differ. Its configuration
    stays as it was given, and so does the config.json of every policy that is made.

    Layers that compute their activations twice do so in training mode only; they alone stay in it, without
    those inside them, and their own rates of dropout become 0.
    """
    for module in model.modules():
        module.training = getattr(module, "gradient_checkpointing", False)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if _RATE.search(name) and isinstance(value, float):
                setattr(module, name, 0.0)
