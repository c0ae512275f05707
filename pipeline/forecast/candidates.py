"""Settings of the update that are worth timing on the machine that runs it, and the best of them. Pure.

One setting after the other is varied from the best so far (coordinate descent): number format, ZeRO stage,
tokens of a micro-batch, attention. So each result was measured with all of its settings together.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.config.schema import Config
from pipeline.config.update import Precision
from pipeline.forecast.parts import GIB

_MICRO_BATCHES = {"cpu": (512, 2048), "gpu": (2048, 8192, 16_384)}
"""Tokens of a micro-batch that are tried on each kind of device."""
_AS_FAST = 1.03
"""Factor of the least seconds up to which a candidate counts as equally fast; the smaller peak then wins."""
_LOSS = {
    Precision.BF16: "bf16 keeps 8 bits of each number: log-probabilities differ from fp32's by its rounding",
    Precision.FP16: "fp16 ends at 65504: steps are skipped while its loss scale is found",
}


@dataclass(frozen=True)
class MachineFacts:
    """What the device that updates compute on can do."""

    name: str
    has_gpu: bool
    has_bf16: bool
    """Whether it has instructions for bf16: a card from compute capability 8.0 on, a processor with
    avx512_bf16 or AMX."""
    has_flash: bool = False
    """Whether flash_attn is installed."""


@dataclass(frozen=True)
class UpdateCandidate:
    """Settings of one update."""

    precision: Precision
    zero_stage: int
    tokens: int
    """update.tokens_per_micro_batch."""
    attention: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """Overrides that set them."""
        return (
            f"update.precision={self.precision}",
            f"update.zero_stage={self.zero_stage}",
            f"update.tokens_per_micro_batch={self.tokens}",
            *((f"update.attention={self.attention}",) if self.attention else ()),
        )

    def changes(self, other: "UpdateCandidate") -> str:
        """Return the words that differ from those of another; of the attention too where one has none."""
        return " ".join(word for word in self.words if word not in other.words)


@dataclass(frozen=True)
class Timed:
    """One candidate's measurement."""

    candidate: UpdateCandidate
    seconds: float = 0.0
    """Median of an update of one optimizer step."""
    tokens_per_second: float = 0.0
    peak: float = 0.0
    """Most bytes at a time: of the GPU by torch's count, else of the process."""
    problem: str = ""
    """Reason why it could not be measured."""


Time = Callable[[UpdateCandidate], Timed]


def candidate_of(config: Config) -> UpdateCandidate:
    """Return the settings that a configuration has."""
    update = config.update
    return UpdateCandidate(update.precision, update.zero, update.micro_batch_tokens, update.attention)


def candidates(config: Config, machine: MachineFacts) -> list[UpdateCandidate]:
    """Return what is tried if nothing is faster than the configuration's own settings, those first."""
    base = candidate_of(config)
    return unique([base, *(one for vary in _VARIED for one in vary(base, config, machine))])


def time_candidates(config: Config, machine: MachineFacts, time: Time) -> Iterator[Timed]:
    """Time the configuration's own settings, then each that may be better than the best so far.

    Args:
        time: measures one candidate.
    """
    found: list[Timed] = []
    for vary in (_own, *_VARIED):
        best = best_of(found)
        if found and best is None:
            return
        known = {one.candidate for one in found}
        base = best.candidate if best else candidate_of(config)
        for one in unique(vary(base, config, machine)):
            if one not in known:
                found.append(time(one))
                yield found[-1]


def best_of(timed: Iterable[Timed]) -> Timed | None:
    """Return the fastest; of those as fast as it is, to 3 %, the one with the least peak. None: none ran."""
    ran = [one for one in timed if not one.problem]
    if not ran:
        return None
    least = min(one.seconds for one in ran)
    return min((one for one in ran if one.seconds <= _AS_FAST * least), key=lambda one: one.peak)


def unique(several: Iterable[UpdateCandidate]) -> list[UpdateCandidate]:
    return list(dict.fromkeys(several))


# --- the settings, each varied from the best so far ---


def _own(base: UpdateCandidate, config: Config, machine: MachineFacts) -> Iterator[UpdateCandidate]:
    yield base


def _precisions(base: UpdateCandidate, config: Config, machine: MachineFacts) -> Iterator[UpdateCandidate]:
    """Yield fp32, and bf16 where the device has it; half precision is trained with ZeRO only."""
    yield replace(base, precision=Precision.FP32)
    if machine.has_bf16:
        yield replace(base, precision=Precision.BF16, zero_stage=max(1, base.zero_stage))


def _stages(base: UpdateCandidate, config: Config, machine: MachineFacts) -> Iterator[UpdateCandidate]:
    """Yield no ZeRO and ZeRO 1 for one rank, where the format and offloading leave a choice."""
    is_free = base.precision is Precision.FP32 and not config.update.offload_optimizer
    if is_free and config.scheduler.num_update_ranks == 1:
        yield from (replace(base, zero_stage=stage) for stage in (0, 1))


def _micro_batches(base: UpdateCandidate, config: Config, machine: MachineFacts) -> Iterator[UpdateCandidate]:
    sizes = _MICRO_BATCHES["gpu" if machine.has_gpu else "cpu"]
    yield from (replace(base, tokens=size) for size in sizes)


def _attentions(base: UpdateCandidate, config: Config, machine: MachineFacts) -> Iterator[UpdateCandidate]:
    """Yield torch's own fused attention, and flash attention on a GPU in half precision."""
    yield replace(base, attention="sdpa") if base.attention else base
    if machine.has_gpu and machine.has_flash and base.precision is not Precision.FP32:
        yield replace(base, attention="flash_attention_2")


_VARIED: tuple[Callable[[UpdateCandidate, Config, MachineFacts], Iterator[UpdateCandidate]], ...] = (
    _precisions,
    _stages,
    _micro_batches,
    _attentions,
)


# --- in words ---


def in_words(timed: Timed) -> str:
    """Describe one measurement in a line."""
    words = " ".join(timed.candidate.words)
    if timed.problem:
        return f"{words}: {timed.problem}"
    speed = f"{timed.seconds:.2f} s, {timed.tokens_per_second:,.0f} tokens/s"
    return f"{words}: {speed}, peak {timed.peak / GIB:.2f} GiB"


def conclusion(timed: Sequence[Timed]) -> str:
    """Say which words set the best, what they gain beside the configuration's own, and what is lost."""
    best, own = best_of(timed), timed[0]
    if best is None:
        return f"nothing could be timed: {own.problem}"
    if best.candidate == own.candidate:
        return "the settings are the best of those timed"
    words = " ".join(best.candidate.words)
    if own.problem:
        return f"best: {words}"
    gain = f"{own.seconds / best.seconds:.2f} times as fast, {(best.peak - own.peak) / GIB:+.2f} GiB"
    is_other = best.candidate.precision is not own.candidate.precision
    lost = f"; {loss}" if is_other and (loss := _LOSS.get(best.candidate.precision)) else ""
    return f"best: {words} ({gain}{lost})"
