"""What a rehearsal has measured on a kind of card, in place of what the formulas assume. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from pipeline.forecast.parts import CONTEXT, GIB, GRAPHS, ONE_CACHE, PASSING, MemoryPart, StageNeed

CPU = "CPU"
"""Kind of card of processes without one."""
PREFIX = "correction/"
"""Beginning of the names of numbers of a finding that are corrections: it, the name of the card, a slash, and
one of :class:`Corrected`."""
_SERVING = (*PASSING, "key-value cache", "sampling")


class Corrected(StrEnum):
    """Numbers that are measured."""

    UPDATE = "update"
    """Factor of activations and logits of an update."""
    SERVING = "serving"
    """Factor of what transformers' engines hold beside weights."""
    CACHE = "cache"
    """Factor of vLLM's key-value cache for a token."""
    VLLM_BYTES = "vllm_bytes"
    """Bytes that vLLM takes as it starts, beside weights and cache."""
    CONTEXT_BYTES = "context_bytes"
    """Bytes of a process on a GPU that torch does not know of."""
    UPDATE_FLOPS = "update_flops"
    """Model FLOP/s of an update on one card; no need of memory has it."""


_IN_WORDS = {
    Corrected.UPDATE: "activations and logits",
    Corrected.SERVING: "cache, sampling and activations",
    Corrected.CACHE: "cache",
    Corrected.VLLM_BYTES: "vLLM's start",
    Corrected.CONTEXT_BYTES: "CUDA",
}
_BYTES = (Corrected.VLLM_BYTES, Corrected.CONTEXT_BYTES)


@dataclass(frozen=True)
class Correction:
    """All that rehearsals have measured on one kind of card."""

    kind: str
    numbers: Mapping[str, float]
    """Values by the names of :class:`Corrected`."""
    made: float
    """When the last was measured, in seconds since the epoch."""


def slope(expected: tuple[float, float], measured: tuple[float, float]) -> float:
    """Return how much faster what was measured grows, between two sizes, than what was expected: what is
    constant in both does not count."""
    return (measured[1] - measured[0]) / (expected[1] - expected[0])


def applied_to(need: StageNeed) -> tuple[Corrected, ...]:
    """Return which corrections are of a need."""
    if need.cache:
        return Corrected.CACHE, Corrected.VLLM_BYTES
    factor = Corrected.UPDATE if need.stage == "update" else Corrected.SERVING
    return factor, Corrected.CONTEXT_BYTES


def corrected(need: StageNeed, correction: Correction | None) -> StageNeed:
    """Return a need with what was measured in place of what the formulas assume."""
    if correction is None:
        return need
    numbers = {name: correction.numbers[name] for name in applied_to(need) if name in correction.numbers}
    parts = tuple(one for part in need.parts for one in _corrected(part, numbers))
    return replace(need, parts=parts, cache=need.cache * numbers.get(Corrected.CACHE, 1.0))


def in_words(need: StageNeed, correction: Correction | None) -> str:
    """Say what has corrected a need; empty for nothing."""
    found = [name for name in applied_to(need) if correction and name in correction.numbers]
    if correction is None or not found:
        return ""
    return ", ".join(f"{_IN_WORDS[name]} {_value(name, correction.numbers[name])}" for name in found)


def _value(name: Corrected, value: float) -> str:
    return f"{value / GIB:.2f} GiB" if name in _BYTES else f"x {value:.2f}"


def _corrected(part: MemoryPart, numbers: Mapping[Corrected, float]) -> Iterator[MemoryPart]:
    """Yield a part as it is corrected. Of what is certain no more becomes certain: a rehearsal's model is
    small, and a stage that would fit must not be refused by it."""
    sizes = {GRAPHS: numbers.get(Corrected.VLLM_BYTES), CONTEXT: numbers.get(Corrected.CONTEXT_BYTES)}
    if part.size and (size := sizes.get(part.name)) is not None:
        yield replace(part, size=size)
        return
    factor = next((numbers[name] for name in numbers if name not in _BYTES and _is_of(part, name)), 1.0)
    if not part.is_certain or factor <= 1:
        yield replace(part, size=part.size * factor)
        return
    yield part
    yield replace(part, size=part.size * (factor - 1), is_certain=False)


def _is_of(part: MemoryPart, name: Corrected) -> bool:
    if name is Corrected.CACHE:
        return part.name == ONE_CACHE
    return part.name in (PASSING if name is Corrected.UPDATE else _SERVING)
