"""Critics: a language model's backbone with one value per token.

Where transformers has a token-classification model of the architecture, that is the class. Elsewhere it is
made here, in the same form: the backbone under its own name, and a linear layer ``score``.
"""

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from pipeline.config.model_files import Tensors, has_head, head_of, read_tensors
from pipeline.config.update import Precision
from stages import ranks
from stages.logs import log
from stages.models.loading import check_missing, check_used, load_arguments, load_with_attention, placement


def load_critic(
    directory: str | Path,
    precision: Precision,
    trust_remote_code: bool,
    attention: str | None = None,
    device_map: str | None = None,
) -> PreTrainedModel:
    """Load a critic from the directory of a critic, of a reward model, whose head it takes, or of a language
    model.

    A head that the directory lacks starts at zero, so that the first advantages are not noise
    (huggingface/blog, "The N implementation details of RLHF with PPO"). It has its numbers even in a model
    without weights (``device_map="meta"``).

    Raises:
        UserError: the directory lacks weights of the backbone, or has some that it leaves out.
    """
    arguments = load_arguments(directory, precision, trust_remote_code) | placement(device_map, precision)
    arguments["config"].num_labels = 1
    critic_class = class_for(arguments["config"], trust_remote_code)
    model, differing = load_with_attention(critic_class, directory, attention, arguments)
    prefix = f"{model.base_model_prefix}."
    check_missing(directory, model, [name for name in differing.missing if name.startswith(prefix)])
    check_used(directory, model, differing.unused, [name for name, _ in model.base_model.named_children()])
    if differing.missing:
        _start_head(model, Path(directory), differing.missing)
    return model


def class_for(config: PreTrainedConfig, trust_remote_code: bool) -> type[PreTrainedModel]:
    """Return the class of a critic of this architecture."""
    if type(config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        found: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(config)]
        return found
    with torch.device("meta"):
        backbone = AutoModel.from_config(config, trust_remote_code=trust_remote_code)
    return _value_class(type(backbone))  # type: ignore[arg-type]


@functools.cache
def _value_class(backbone: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Make a subclass of the architecture's own base class, which knows how its weights are initialised,
    split and checkpointed."""
    base = next(one for one in backbone.__mro__[1:] if issubclass(one, PreTrainedModel))
    name = f"{backbone.__name__.removesuffix('Model')}ForTokenClassification"
    own = {"backbone_class": backbone, "base_model_prefix": base.base_model_prefix or "model"}
    made: type[PreTrainedModel] = type(name, (_ValueModel, base), own | {"__module__": __name__})
    return made


class _ValueModel(PreTrainedModel):
    """A value model in the form of transformers' token classifiers, over any backbone."""

    backbone_class: type[PreTrainedModel]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        backbone = self.backbone_class(config)
        setattr(self, self.base_model_prefix, backbone)
        # As wide as what a language model's head reads: not hidden_size where embeddings are projected.
        embeddings: Any = backbone.get_input_embeddings()
        width = embeddings.weight.shape[1]
        self.score = nn.Linear(width, 1)
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Whether mixtures of experts have a choice, which transformers reads from the source of the class's
        module: here from that of the backbone."""
        return cls.backbone_class._can_set_experts_implementation()

    def forward(self, input_ids: Tensor, **others: Any) -> TokenClassifierOutput:
        """Return values [B, T, 1] as logits."""
        hidden = self.base_model(input_ids=input_ids, **others).last_hidden_state
        return TokenClassifierOutput(logits=self.score(hidden.to(self.score.weight.dtype)))


@torch.no_grad()
def _start_head(model: PreTrainedModel, directory: Path, missing: Collection[str]) -> None:
    """Copy the head's missing weights from the directory's head, whatever its name; else set them to zero."""
    tensors = read_tensors(directory)
    embeddings: Any = model.get_input_embeddings()
    width = embeddings.weight.shape[1]
    head = head_of(tensors)
    source = head if head and tensors[f"{head}.weight"].shape == (1, width) else None
    for name, found in list(model.named_parameters()):
        if name in missing:
            parameter = _in_memory(model, name, found)
            parameter.zero_()
            key = f"{source}.{name.rpartition('.')[2]}"
            if source and key in tensors:
                with safe_open(tensors[key].path, "pt") as file:
                    parameter.copy_(file.get_tensor(key))
    if ranks.is_first():
        log.info(f"critic: {_head_in_words(directory, source, tensors)}")


def _in_memory(model: PreTrainedModel, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter that has numbers: in a model without weights, one that is put into its place."""
    if parameter.is_meta:
        parameter = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
        module, _, key = name.rpartition(".")
        model.get_submodule(module).register_parameter(key, parameter)
    return parameter


def _head_in_words(directory: Path, source: str | None, tensors: Tensors) -> str:
    if source:
        return f"it starts with the head {source} of {directory}"
    if has_head(tensors):
        return f"the head of {directory} is not one linear layer and cannot be taken; values start at zero"
    return f"{directory} has no head; values start at zero"
