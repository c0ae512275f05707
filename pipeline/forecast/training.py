"""Memory of one rank of the update, by part. Pure.

States per weight: ZeRO (arXiv 1910.02054, section 3), and what DeepSpeed holds beside them, as measured. Per
token and layer: what the backward pass of a decoder layer keeps (arXiv 2205.05198, section 4), without the
attention matrix, which fused kernels do not keep. docs/explanation/memory.md has both in a table.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.config.update import HALF, Precision, UpdateConfig
from pipeline.forecast.parts import CONTEXT, GIB, TRAINING, MemoryPart, PeakPhase
from pipeline.forecast.shapes import ModelShape

_FP32 = 4
_MOMENTS = 8
_BUCKET = 500_000_000
"""Most elements of a bucket of gradients (stages/ppo/zero.py)."""
_GATHERED = 1_000_000_000
"""Most weights that ZeRO 3 keeps gathered: DeepSpeed's own default."""
_CHUNK = {True: 1 << 26, False: 1 << 24}
"""Most logits that exist at a time, on a GPU and elsewhere (stages/ppo/head.py)."""
_PIECE = {True: 1 << 25, False: 1 << 18}
"""Logits in fp32 at a time, on a GPU and elsewhere (stages/ppo/logits.py), in three copies."""
_COPIES = 3
CUDA = 0.6 * GIB
"""Bytes of a CUDA context and of libraries' workspaces on a GPU, roughly; not measured."""
_NCCL = 1.0 * GIB
"""Bytes of NCCL's buffers on a GPU, roughly; not measured."""
_PROCESS = 3.0 * GIB
"""Bytes of a process with torch, its libraries and a CUDA context on the host, roughly; not measured."""


@dataclass(frozen=True)
class BatchSize:
    """Largest micro-batch of a rank."""

    tokens: int
    predicted: int
    """Positions whose logits are computed."""
    longest: int
    """Tokens of its longest row."""


@dataclass(frozen=True)
class Ranks:
    """Processes that share an update."""

    number: int
    have_gpus: bool


@dataclass(frozen=True)
class _Phases:
    """Phases of one of the two models."""

    name: str
    backward: PeakPhase
    reduce: PeakPhase
    step: PeakPhase
    holds_gradients: tuple[PeakPhase, ...]
    """Phases in which gradients are whole that are freed before the step."""


_POLICY = _Phases(
    "policy",
    PeakPhase.POLICY_BACKWARD,
    PeakPhase.POLICY_REDUCE,
    PeakPhase.POLICY_STEP,
    (PeakPhase.POLICY_BACKWARD, PeakPhase.POLICY_REDUCE, PeakPhase.CRITIC_BACKWARD, PeakPhase.CRITIC_REDUCE),
)
_CRITIC = _Phases(
    "critic",
    PeakPhase.CRITIC_BACKWARD,
    PeakPhase.CRITIC_REDUCE,
    PeakPhase.CRITIC_STEP,
    (
        PeakPhase.POLICY_BACKWARD,
        PeakPhase.POLICY_REDUCE,
        PeakPhase.CRITIC_BACKWARD,
        PeakPhase.CRITIC_REDUCE,
        PeakPhase.POLICY_STEP,
    ),
)


def width_of(precision: Precision) -> int:
    """Return the bytes of a number."""
    return 2 if precision in HALF else _FP32


def update_parts(
    update: UpdateConfig,
    policy: ModelShape,
    critic: ModelShape | None,
    reference: ModelShape | None,
    batch: BatchSize,
    ranks: Ranks,
) -> tuple[MemoryPart, ...]:
    """Return the parts of one rank of an update.

    Args:
        reference: reference whose log-probabilities the update computes, if it does.
    """
    return (
        *_of_device(ranks),
        *_of_model(update, policy, batch, ranks, _POLICY),
        *(_of_model(update, critic, batch, ranks, _CRITIC) if critic else ()),
        *(_of_reference(update, reference, batch, ranks) if reference else ()),
    )


def host_parts(
    update: UpdateConfig, policy: ModelShape, critic: ModelShape | None, ranks: Ranks
) -> tuple[MemoryPart, ...]:
    """Return the parts of one rank with a GPU in its host's memory. Weights go straight from their files to
    the GPU, with ZeRO 3 one after the other."""
    width, models = width_of(update.precision), [policy, *([critic] if critic else [])]
    parts = [MemoryPart("process", _PROCESS, (PeakPhase.REFERENCE, *TRAINING))]
    if update.zero == 3:
        parts.append(MemoryPart("loading", max(one.largest for one in models) * width, TRAINING))
    share = ranks.number if update.zero else 1
    states = sum(one.trained for one in models) / share
    if update.offload_optimizer:
        parts.append(MemoryPart("optimizer", states * (_FP32 + _MOMENTS), TRAINING, is_certain=True))
        parts.append(MemoryPart("gradients", states * _FP32, TRAINING))
    else:
        copied = _MOMENTS if width == _FP32 else _MOMENTS + _FP32
        parts.append(MemoryPart("snapshot", states * copied, (PeakPhase.CRITIC_STEP,)))
    return tuple(parts)


def _of_device(ranks: Ranks) -> Iterator[MemoryPart]:
    if ranks.have_gpus:
        yield MemoryPart(CONTEXT, CUDA, tuple(PeakPhase))
    if ranks.have_gpus and ranks.number > 1:
        yield MemoryPart("NCCL", _NCCL, tuple(PeakPhase))


def _of_model(
    update: UpdateConfig, shape: ModelShape, batch: BatchSize, ranks: Ranks, phases: _Phases
) -> Iterator[MemoryPart]:
    yield from _states(update, shape, ranks, phases)
    yield from _temporaries(update, shape, ranks, phases)
    width = width_of(update.precision)
    size = batch.tokens * activations_per_token(update, shape, batch.longest)
    yield MemoryPart("activations", size, (phases.backward,))
    if shape.vocabulary:
        made = made_at_a_time(shape, batch.predicted, ranks.have_gpus) * width
        # Logits and their gradient, and that of the output layer.
        yield MemoryPart("logits", made, (phases.backward,), is_certain=True)
        yield MemoryPart("logits", made + shape.hidden * shape.vocabulary * width, (phases.backward,))
        yield pieces(shape, batch.predicted, ranks.have_gpus, phases.backward)


def made_at_a_time(shape: ModelShape, predicted: int, has_gpu: bool) -> int:
    """Return the most logits that exist at a time.

    Args:
        predicted: positions whose logits are computed.
    """
    return min(max(_CHUNK[has_gpu], shape.vocabulary), predicted * shape.vocabulary)


def pieces(shape: ModelShape, predicted: int, has_gpu: bool, phase: PeakPhase) -> MemoryPart:
    """Return what is made of logits in fp32, a piece at a time."""
    largest = min(_PIECE[has_gpu], predicted * shape.vocabulary)
    return MemoryPart("logits", _COPIES * _FP32 * largest, (phase,))


def _states(update: UpdateConfig, shape: ModelShape, ranks: Ranks, phases: _Phases) -> Iterator[MemoryPart]:
    """Yield what is held from one micro-batch to the next."""
    stage, width, trained = update.zero, width_of(update.precision), shape.trained
    share = trained / ranks.number if stage else trained
    whole = shape.parameters / ranks.number if stage == 3 else shape.parameters
    what = f"{phases.name}'s " if phases is _CRITIC else ""
    yield MemoryPart(f"{what}weights", whole * width, TRAINING, is_certain=True)
    if not update.offload_optimizer:
        master = _FP32 if stage else 0
        yield MemoryPart(f"{what}optimizer", share * (master + _MOMENTS), TRAINING, is_certain=True)
    if stage == 0 or _is_bf16_optimizer(update):
        yield MemoryPart(f"{what}gradients", trained * _FP32, TRAINING, is_certain=True)
    elif stage == 1:
        yield MemoryPart(f"{what}gradients", trained * _FP32, phases.holds_gradients, is_certain=True)
    elif not update.offload_optimizer:
        yield MemoryPart(f"{what}gradients", share * _FP32, TRAINING, is_certain=True)
    if stage == 3:
        yield MemoryPart("buckets", _bucket(trained), TRAINING)


def _temporaries(
    update: UpdateConfig, shape: ModelShape, ranks: Ranks, phases: _Phases
) -> Iterator[MemoryPart]:
    """Yield what lives for a part of a micro-batch or of a step."""
    stage, width, trained = update.zero, width_of(update.precision), shape.trained
    share, both = trained / ranks.number if stage else trained, (phases.backward, phases.reduce)
    half = 0 if width == _FP32 else width
    if stage == 0:
        if ranks.number > 1:
            yield MemoryPart("buckets", _bucket(trained), (phases.reduce,))
    elif stage == 3:
        yield MemoryPart("gathered weights", width * min(shape.parameters, _GATHERED), both)
        yield MemoryPart("buckets", _bucket(trained) + half * min(trained, _BUCKET), (phases.reduce,))
    elif not _is_bf16_optimizer(update):
        # Only with NCCL does ZeRO 1 reduce gradients while others are computed.
        during = both if ranks.have_gpus or stage == 2 else (phases.reduce,)
        yield MemoryPart("buckets", _bucket(trained), during)
        if stage == 2:
            yield MemoryPart("buckets", share * _FP32, (phases.reduce,))
        elif half:  # in fp32 a rank's share is a view of the gradients
            yield MemoryPart("buckets", share * _FP32 + half * trained, (phases.reduce,))
    if not update.offload_optimizer:
        yield MemoryPart("step", _step(update, share, ranks), (phases.step,))


def _step(update: UpdateConfig, share: float, ranks: Ranks) -> float:
    """Return the bytes that AdamW's step takes beside what it steps on. On GPUs it computes all tensors at
    once with one copy, elsewhere a small part after the other (stages/ppo/adamw.py).

    Args:
        share: weights that this rank steps.
    """
    copies = 1 if ranks.have_gpus else 0
    if update.zero == 1 and not _is_bf16_optimizer(update):
        copies += 1  # gradients that were summed over ranks
    return share * _FP32 * (copies + (update.zero == 3))


def _is_bf16_optimizer(update: UpdateConfig) -> bool:
    """Whether DeepSpeed takes its optimizer for bf16, which keeps the sum of all gradients in fp32."""
    is_bf16 = update.precision is Precision.BF16
    return is_bf16 and update.zero == 1 and not update.offload_optimizer


def _bucket(trained: int) -> float:
    return _FP32 * min(trained, _BUCKET)


def _of_reference(
    update: UpdateConfig, shape: ModelShape, batch: BatchSize, ranks: Ranks
) -> Iterator[MemoryPart]:
    width, during = width_of(update.precision), (PeakPhase.REFERENCE,)
    yield from weights("reference", shape, width, 1 / ranks.number if update.zero == 3 else 1, during)
    made = made_at_a_time(shape, batch.predicted, ranks.have_gpus)
    yield MemoryPart("logits", made * width, during, is_certain=True)
    yield pieces(shape, batch.predicted, ranks.have_gpus, PeakPhase.REFERENCE)
    yield MemoryPart("activations", batch.tokens * passing_per_token(shape, width), during)


def weights(
    name: str, shape: ModelShape, width: int, share: float, during: tuple[PeakPhase, ...]
) -> Iterator[MemoryPart]:
    """Yield a share of a frozen model's weights in transformers. FP8 stays so on GPUs from compute capability
    8.9 on only, so that no more than the bytes of the files are certain."""
    stored = shape.as_stored(width)
    yield MemoryPart(name, stored * share, during, is_certain=True)
    if more := shape.dequantised(width) - stored:
        yield MemoryPart(name, more * share, during)


def activations_per_token(update: UpdateConfig, shape: ModelShape, longest: int) -> float:
    """Return the bytes that the backward pass keeps for each token, logits left out."""
    width = width_of(update.precision)
    # A norm keeps its input in fp32, what it scales, and what it gives, which the next layers take.
    norms = 2 * shape.hidden * (_FP32 + 2 * width)
    attention = 2 * (shape.queries + shape.keys) * width
    feeding = (4 if shape.is_gated else 2) * shape.inner * width
    layer = norms + attention + feeding
    if update.attention == "eager":
        layer += shape.heads * longest * (_FP32 + 2 * width)
    if update.activation_checkpointing:
        return float(shape.layers * shape.hidden * width + layer)
    return float(shape.layers * layer + norms / 2)


def passing_per_token(shape: ModelShape, width: int) -> float:
    """Return the bytes of a forward pass for each token that no backward pass follows: of one layer."""
    inner = (3 if shape.is_gated else 2) * shape.inner
    return float(width * (2 * shape.hidden + max(inner, shape.queries + 2 * shape.keys)))
