"""Models without weights, which are then read one at a time while ZeRO 3 shares them out: no rank ever holds
all of them, neither on its device nor in its host's memory.

Where transformers keeps several tensors of the files as one weight, they are read together
(:mod:`stages.ppo.state.conversion`). Where it is not clear which, the first rank loads the whole model into
its host's memory and hands out one weight at a time.
"""

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.config.model_files import read_tensors
from stages import ranks
from stages.logs import log
from stages.models.devices import device
from stages.ppo.state.conversion import TensorSource, sources_of

Read = Callable[[str], dict[str, Tensor]]
"""Return the weight of a name, and those that have to be read with it."""


@dataclass(frozen=True)
class Bare:
    """A model on torch's meta device, and where its weights are."""

    model: PreTrainedModel
    names: Mapping[nn.Parameter, str]
    """Names, in the files' model, of the weights that are to be read: others the model has already, such as
    adapters. They stay the same whatever is put around the layers."""
    read: Read
    """For the first rank."""


def bare_model(load: Callable[[str], PreTrainedModel], directory: Path) -> Bare:
    """Return a directory's model without its weights, but with its buffers. Every rank takes part.

    Args:
        load: loads the model to a device.
    """
    model = load("meta")
    sources = sources_of(model, read_tensors(directory))
    if sources is not None:

        def read(name: str) -> dict[str, Tensor]:
            return sources[name].read(model)

        _tie(model, lambda one, other: torch.equal(read(one)[one], read(other)[other]))
        names = _names(model, sources)
        if sources.keys() >= set(names.values()) and _fill_buffers(model, sources):
            return Bare(model, names, read)
    return _read_by_first_rank(model, load, directory)


def _names(model: PreTrainedModel, known: Container[str]) -> dict[nn.Parameter, str]:
    """Return a name of each weight that is not there: of those that a tied one has, a known one."""
    found: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta and found.get(parameter, "") not in known:
            found[parameter] = name
    return found


def _read_by_first_rank(
    model: PreTrainedModel, load: Callable[[str], PreTrainedModel], directory: Path
) -> Bare:
    """Return a model whose weights the first rank holds, all of them, until they are shared out."""
    whole: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    if ranks.is_first():
        log.info(
            f"{directory}: its weights cannot be read one by one; rank 0 loads the whole model into its "
            "host's memory, and hands them out"
        )
        loaded = load("cpu")
        whole = {name: p.detach() for name, p in loaded.named_parameters(remove_duplicate=False)}
        buffers = dict(loaded.named_buffers(remove_duplicate=False))
    for name, value in ranks.share(buffers)[0].items():
        module, _, key = name.rpartition(".")
        model.get_submodule(module)._buffers[key] = value.clone()
    _tie(model, lambda one, other: torch.equal(whole[one], whole[other]))
    return Bare(model, _names(model, ()), lambda name: {name: whole.pop(name)})


def _tie(model: PreTrainedModel, is_equal: Callable[[str, str], bool]) -> None:
    """Tie weights of which the files have both, if they are equal, as transformers does with those it reads.

    Args:
        is_equal: whether two weights are; asked of the first rank.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    tied = [pair for pair in model.all_tied_weights_keys.items() if weights.keys() >= set(pair)]
    apart = [(target, source) for target, source in tied if weights[target] is not weights[source]]
    if not apart:
        return
    for target, source in ranks.share([p for p in apart if ranks.is_first() and is_equal(*p)])[0]:
        module, _, key = target.rpartition(".")
        setattr(model.get_submodule(module), key, weights[source])


def _fill_buffers(model: PreTrainedModel, sources: Mapping[str, TensorSource]) -> bool:
    """Give the model its buffers, from files or as it makes them itself. Returns whether it has them all."""
    made: list[Tensor] = []
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            if full_name in sources:
                value = sources[full_name].read(model)[full_name]
            elif buffer.is_floating_point():
                value = torch.full_like(buffer, torch.nan, device="cpu")
                module._is_hf_initialized = False
                made.append(value)
            else:
                return False
            module._buffers[name] = value
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()
    return not any(bool(value.isnan().any()) for value in made)


@contextlib.contextmanager
def looking_filled(model: nn.Module) -> Iterator[None]:
    """Let weights that are on the meta device look as if they were in the host's memory, where one number
    stands for all of a weight's. For code that makes something beside each weight, where that is."""
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in stand_ins:
                    number = torch.zeros((), dtype=parameter.dtype, device="cpu")
                    stand_ins[parameter] = nn.Parameter(number.expand(parameter.shape))
                replaced.append((module, key, parameter))
                module._parameters[key] = stand_ins[parameter]
    yield
    for module, key, parameter in replaced:
        parameter.requires_grad_(stand_ins[parameter].requires_grad)
        module._parameters[key] = parameter


def filled(bare: Bare) -> Iterator[nn.Parameter]:
    """Give the model its weights, one at a time, on the device: the first rank's, which others are sent.

    Each is to be shared out before the next is asked for.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in bare.model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, key))
    waiting: dict[str, Tensor] = {}
    for _, empty in list(bare.model.named_parameters()):
        if empty not in bare.names:
            yield empty
            continue
        parameter = nn.Parameter(_weight(bare, empty, waiting), requires_grad=empty.requires_grad)
        for module, key in places[empty]:
            module._parameters[key] = parameter
        yield parameter


def _weight(bare: Bare, empty: nn.Parameter, waiting: dict[str, Tensor]) -> Tensor:
    """Return a weight on the device; other ranks than the first return one without its numbers.

    Args:
        waiting: weights that were read with others, by name; changed.
    """
    if not ranks.is_first():
        return torch.empty(empty.shape, dtype=empty.dtype, device=device())
    name = bare.names[empty]
    if name not in waiting:
        waiting |= bare.read(name)
    return waiting.pop(name).to(device(), empty.dtype).contiguous()
