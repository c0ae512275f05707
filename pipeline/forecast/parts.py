"""A need of memory as a sum of parts, each alive in some phases of a task. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

GIB = 2**30
PASSING = ("activations", "logits")
"""Names of parts that live for one micro-batch, or batch."""
CONTEXT = "CUDA"
"""Name of what a process has of a GPU beside torch's memory."""
GRAPHS = "graphs"
"""Name of what vLLM has beside torch's memory."""
ONE_CACHE = "key-value cache of one sequence"
"""Name of the least cache with which vLLM starts."""


class PeakPhase(StrEnum):
    """PeakPhase of a task, at whose end its largest temporaries are freed."""

    REFERENCE = "reference"
    """Log-probabilities of the reference, which is freed before the trained models are loaded."""
    POLICY_BACKWARD = "policy's backward pass"
    POLICY_REDUCE = "policy's gradients"
    """Summing gradients over ranks, when activations are freed."""
    CRITIC_BACKWARD = "critic's backward pass"
    CRITIC_REDUCE = "critic's gradients"
    POLICY_STEP = "policy's step"
    CRITIC_STEP = "critic's step"
    SERVING = "serving"
    """Generating or scoring."""


TRAINING = tuple(phase for phase in PeakPhase if phase not in (PeakPhase.REFERENCE, PeakPhase.SERVING))
"""Phases in which policy and critic are loaded."""


@dataclass(frozen=True)
class MemoryPart:
    """Memory for one purpose."""

    name: str
    size: float
    """Bytes."""
    during: tuple[PeakPhase, ...]
    is_certain: bool = False
    """Whether no smaller amount can do, so that a task which lacks it fails."""


@dataclass(frozen=True)
class StageNeed:
    """Memory that a task of one stage needs, on each of its GPUs and on the host of each of its processes."""

    stage: str
    parts: tuple[MemoryPart, ...]
    """Parts on a GPU; on a machine without, of the host."""
    host: tuple[MemoryPart, ...] = ()
    """Parts in the host's memory beside a GPU."""
    num_ranks: int = 1
    """Processes of a task."""
    share: float = 1.0
    """Share of the GPU's memory that it may take."""
    cache: float = 0.0
    """Bytes of the key-value cache for a longest sequence, where the rest of the GPU is for such; else 0."""

    @property
    def peak(self) -> float:
        """Bytes of the largest phase."""
        return peak_of(self.parts)

    @property
    def certain(self) -> float:
        """Bytes of the largest phase, of certain parts alone."""
        return peak_of([part for part in self.parts if part.is_certain])

    def sequences(self, memory: float) -> int:
        """Return how many longest sequences a GPU of ``memory`` bytes has a cache for, of a need with one."""
        return max(0, int((memory * self.share - self.peak) // self.cache) + 1)

    @property
    def at_peak(self) -> list[MemoryPart]:
        """Parts that are alive in the largest phase, those of one name together, the largest first."""
        phase = max(PeakPhase, key=lambda one: _size_in(one, self.parts))
        found: dict[str, float] = {}
        for part in self.parts:
            if phase in part.during and part.size:
                found[part.name] = found.get(part.name, 0.0) + part.size
        by_size = sorted(found.items(), key=lambda item: -item[1])
        return [MemoryPart(name, size, (phase,)) for name, size in by_size]


def peak_of(parts: Iterable[MemoryPart]) -> float:
    """Return the bytes of the largest phase."""
    given = tuple(parts)
    return max((_size_in(phase, given) for phase in PeakPhase), default=0.0)


def _size_in(phase: PeakPhase, parts: Iterable[MemoryPart]) -> float:
    return sum(part.size for part in parts if phase in part.during)
