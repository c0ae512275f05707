"""A light engine in the place of vLLM's: its key-value cache has room from a share of the card on."""

from stages.engines.base import without_torch
from tests.support import light

_SHARE = 0.9
_TOO_SMALL = (
    "To serve at least one request with the model's max seq len (64), (0.5 GiB KV cache is needed, which is "
    "larger than the available KV cache memory (0.1 GiB)). Try increasing `gpu_memory_utilization`."
)


@without_torch
def make_generator(config, directory):
    if (config.rollout.vllm.gpu_memory_utilization or 0.0) <= _SHARE:
        raise ValueError(_TOO_SMALL)
    return light.make_generator(config, directory)
