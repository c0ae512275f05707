"""Weights of a committed policy, by the names of a trainer's parameters, read in parts."""

from dataclasses import dataclass

from torch import Tensor

from pipeline.config.model_files import Tensors, read_header, read_tensors
from pipeline.run.paths import ADAPTER
from stages.adapters import ADAPTER_FILE
from stages.context import Context
from stages.models import load_causal_lm
from stages.ppo.lora import saved_name
from stages.ppo.state.tensor_files import read_part


@dataclass(frozen=True)
class CommittedWeights:
    """Weights on disk; or in memory, where transformers has to convert the files to what a model has."""

    stored: Tensors
    loaded: dict[str, Tensor] | None
    is_adapter: bool

    def part(self, name: str, start: int, length: int) -> Tensor:
        """Return [length] elements of a flat parameter, in the format that they were committed in."""
        if self.loaded is not None:
            return self.loaded[name].view(-1)[start : start + length]
        return read_part(self.stored[self._name(name)], start, start + length)

    def whole(self, name: str) -> Tensor:
        """Return a whole parameter."""
        if self.loaded is not None:
            return self.loaded[name]
        stored = self.stored[self._name(name)]
        return read_part(stored).view(stored.shape)

    def _name(self, name: str) -> str:
        return saved_name(name) if self.is_adapter else name


def committed_weights(context: Context, version: int) -> CommittedWeights:
    """Return the weights of a policy, verified: of its adapters, where these are what is trained.

    Raises:
        CorruptData, NotCommitted, Thinned: on every rank.
    """
    files, config = context.policy_files(version), context.config
    folder = files.base
    if config.update.lora is not None:
        adapter = files.adapter or folder / ADAPTER  # older programs committed it beside the merged policy
        return CommittedWeights(read_header(adapter / ADAPTER_FILE), None, is_adapter=True)
    stored = read_tensors(folder)
    precision, trust = config.update.precision, config.model.trust_remote_code
    bare = load_causal_lm(folder, precision, trust, device_map="meta")
    shapes = {name: tuple(parameter.shape) for name, parameter in bare.named_parameters()}
    if all(name in stored and stored[name].shape == shape for name, shape in shapes.items()):
        return CommittedWeights(stored, None, is_adapter=False)
    model = load_causal_lm(folder, precision, trust, device_map="cpu")
    loaded = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return CommittedWeights({}, loaded, is_adapter=False)
