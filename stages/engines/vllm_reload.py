"""Other weights in a model that vLLM has loaded. These functions run where the model is, in vLLM's workers.

vLLM reloads layer by layer, and a layer that shares its weight with another (a head with the embedding) gets
nothing of its own. On CPUs it computes with a packed copy of that weight, which would be an old one.
"""

from collections import defaultdict

from torch import nn

_PACKED = "UnquantizedEmbeddingMethod"


def shared_weights(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each weight that has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, weight in model.named_parameters(remove_duplicate=False):
        names[id(weight)].append(name)
    return sorted(tuple(sorted(found)) for found in names.values() if len(found) > 1)


def pack_shared(model: nn.Module) -> None:
    """Pack again what layers compute with that share a weight.

    Raises:
        NotImplementedError: it is quantised, so that nobody knows what the layer keeps of it.
    """
    for names in shared_weights(model):
        for name in names:
            layer = model.get_submodule(name.rpartition(".")[0])
            method = getattr(layer, "quant_method", None)
            if method is None or type(method).__name__ != _PACKED:
                raise NotImplementedError(f"{name} is shared and of {type(method).__name__}")
            method.process_weights_after_loading(layer)
