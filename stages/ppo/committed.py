"""Weights of a committed policy, by the names of a trainer's parameters, read in parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming

from pipeline.config.model_files import read_header, read_tensors
from pipeline.run.paths import ADAPTER
from stages import ranks
from stages.context import Context
from stages.models.adapters import ADAPTER_FILE
from stages.models.loading import load_causal_lm
from stages.ppo.lora import saved_name
from stages.ppo.state.conversion import TensorSource, sources_of
from stages.ppo.state.tensor_files import read_part
from stages.ppo.training import say

Load = Callable[[str], PreTrainedModel]
"""Load the model to a device."""


@dataclass(frozen=True)
class CommittedWeights:
    """Weights on disk. Every rank asks for the same ones in the same order, though maybe for other parts."""

    read: Callable[[str, int, int | None], Tensor]
    """Return elements of a flat weight, from the first index up to the second or to its end, in the format
    that they were committed in."""
    shape_of: Callable[[str], Sequence[int]]

    def part(self, name: str, start: int, length: int) -> Tensor:
        """Return [length] elements of a flat parameter."""
        return self.read(name, start, start + length)

    def whole(self, name: str) -> Tensor:
        """Return a whole parameter."""
        return self.read(name, 0, None).view(tuple(self.shape_of(name)))


def committed_weights(context: Context, version: int) -> CommittedWeights:
    """Return the weights of a policy, verified: of its adapters, where these are what is trained.

    Raises:
        CorruptData, NotCommitted, Thinned: on every rank.
    """
    files, config = context.policy_files(version), context.config
    folder = files.base
    if config.update.lora is not None:
        adapter = files.adapter or folder / ADAPTER  # older programs committed it beside the merged policy
        stored = read_header(adapter / ADAPTER_FILE)
        return CommittedWeights(
            lambda name, start, stop: read_part(stored[saved_name(name)], start, stop),
            lambda name: stored[saved_name(name)].shape,
        )
    precision, trust = config.update.precision, config.model.trust_remote_code
    return weights_in(folder, lambda placement: load_causal_lm(folder, precision, trust, placement))


def weights_in(folder: Path, load: Load) -> CommittedWeights:
    """Return the weights of a model's directory. Where it is not clear of which tensors of the files each is
    made, the first rank loads the whole model into its host's memory, and sends one weight at a time."""
    bare = load("meta")
    weights = dict(bare.named_parameters())
    sources = sources_of(bare, read_tensors(folder))
    if sources is not None and sources.keys() >= weights.keys():
        read = _converting(bare, sources)
    else:
        say(f"{folder}: its weights cannot be read one by one; rank 0 loads the whole model")
        read = _sent_by_first_rank(weights, load)
    return CommittedWeights(read, lambda name: weights[name].shape)


def _converting(
    bare: PreTrainedModel, sources: Mapping[str, TensorSource]
) -> Callable[[str, int, int | None], Tensor]:
    """Return what reads parts of weights that lie in the files as they are; others whole, with those that
    they are converted with."""
    last: dict[str, Tensor] = {}

    def read(name: str, start: int, stop: int | None) -> Tensor:
        source = sources[name]
        if isinstance(source.transform, WeightRenaming):
            return read_part(source.pieces[0].stored, start, stop)
        if start == stop:
            return torch.empty(0, dtype=source.dtype)
        if name not in last:
            last.clear()
            last.update(source.read(bare))
        return last[name].reshape(-1)[start:stop]

    return read


def _sent_by_first_rank(
    weights: Mapping[str, Tensor], load: Load
) -> Callable[[str, int, int | None], Tensor]:
    """Return what sends every rank a whole weight, and keeps a part of it.

    Args:
        weights: their shapes and formats.
    """
    loaded: dict[str, Tensor] = {}
    with ranks.agreed(Exception):  # whatever it is: the others wait
        if ranks.is_first():
            loaded = {name: parameter.detach() for name, parameter in load("cpu").named_parameters()}

    def read(name: str, start: int, stop: int | None) -> Tensor:
        return ranks.sent_by_first(loaded.get(name), weights[name]).reshape(-1)[start:stop]

    return read
