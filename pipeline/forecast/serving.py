"""Memory of a GPU that generates or scores, by part. Pure."""

from collections.abc import Iterator

from pipeline.config.engines import VllmConfig
from pipeline.forecast.parts import GIB, GRAPHS, ONE_CACHE, MemoryPart, PeakPhase
from pipeline.forecast.shapes import ModelShape
from pipeline.forecast.training import made_at_a_time, passing_per_token, pieces, weights

_SAMPLING = 24
"""Bytes for each row and id as transformers chooses a token, beside the model's logits: scores in fp32,
twice, and probabilities and their sums in fp64."""
_VLLM_SAMPLING = 12
"""Bytes for each sequence and id in vLLM's sampler: logits in fp32, and log-probabilities."""
_VLLM_TOKENS = 8192
"""Tokens of a step of vLLM if none are given: on most cards."""
_VLLM_GRAPHS = 1.0 * GIB
"""Bytes of CUDA graphs and of libraries beside torch, roughly; not measured."""
_DURING = (PeakPhase.SERVING,)


def generating(
    shape: ModelShape, width: int, tokens: int, longest_response: int, gpus: int
) -> list[MemoryPart]:
    """Return the parts of transformers' engine.

    Args:
        tokens: token budget of a batch.
        gpus: GPUs that the layers are spread over.
    """
    rows = max(1, tokens // (longest_response + 1))
    cache = 2 * shape.layers * shape.keys * width / gpus
    prompts = max(0, tokens - rows * longest_response)
    growing = tokens * shape.keys * width  # one layer's keys, as each token lays them end to end again
    return [
        MemoryPart("weights", shape.parameters * width / gpus, _DURING, is_certain=True),
        MemoryPart("key-value cache", tokens * cache + growing, _DURING),
        MemoryPart("sampling", rows * shape.vocabulary * (_SAMPLING + width), _DURING),
        MemoryPart("activations", prompts * passing_per_token(shape, width), _DURING),
    ]


def scoring(name: str, shape: ModelShape, width: int, tokens: int, spread: int) -> list[MemoryPart]:
    """Return the parts of a model in transformers' engine, logits left out.

    Args:
        spread: GPUs that the layers are spread over.
    """
    return [
        *weights(name, shape, width, 1 / spread, _DURING),
        MemoryPart("activations", tokens * passing_per_token(shape, width), _DURING),
    ]


def scoring_tokens(
    name: str, shape: ModelShape, width: int, tokens: int, spread: int, has_gpu: bool
) -> list[MemoryPart]:
    """Return the parts of a reference or teacher; of one spread over GPUs all logits stand at once."""
    whole = tokens * shape.vocabulary
    made = whole if spread > 1 else made_at_a_time(shape, tokens, has_gpu)
    return [
        *scoring(name, shape, width, tokens, spread),
        MemoryPart("logits", made * width, _DURING),
        pieces(shape, tokens, has_gpu, PeakPhase.SERVING),
    ]


def in_vllm(
    shape: ModelShape, width: int, given: VllmConfig, longest: int, name: str = "weights"
) -> Iterator[MemoryPart]:
    """Yield the parts of vLLM, with a cache for one sequence of ``longest`` tokens, which it insists on."""
    shards = given.tensor_parallel_size * given.pipeline_parallel_size
    tokens = given.max_num_batched_tokens or max(_VLLM_TOKENS, given.max_num_seqs)
    yield MemoryPart(name, shape.as_stored(width) / shards, _DURING, is_certain=True)
    one = longest * cache_per_token(shape, width, given)
    yield MemoryPart(ONE_CACHE, one, _DURING, is_certain=True)
    passing = tokens * passing_per_token(shape, width) / given.tensor_parallel_size
    yield MemoryPart("activations", passing, _DURING)
    yield MemoryPart("sampling", given.max_num_seqs * shape.vocabulary * _VLLM_SAMPLING, _DURING)
    yield MemoryPart(GRAPHS, 0 if given.enforce_eager else _VLLM_GRAPHS, _DURING)


def cache_per_token(shape: ModelShape, width: int, given: VllmConfig) -> float:
    """Return the bytes of vLLM's cache for a token on one GPU. Key heads are not split, but repeated."""
    heads = max(1.0, shape.key_heads / given.tensor_parallel_size)
    return 2 * shape.layers * heads * shape.head_size * width / given.pipeline_parallel_size
