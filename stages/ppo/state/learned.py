"""The small numbers of an update, committed with its policy: all that rows, rewards and a replay need."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

import torch

from pipeline.config.algorithm import KLConfig, KLController
from pipeline.config.conversion import converted
from pipeline.run.plan import policy_maker
from stages import ranks
from stages.context import Context
from stages.models.devices import device
from stages.ppo.math.shaping import RunningMoments

PART = "learned"
"""Part of the update's data file that holds :class:`Learned`."""
_PACKAGES = ("torch", "deepspeed", "transformers")


class StepDecision(StrEnum):
    """What an update did with a gradient."""

    TAKEN = "taken"
    """Step taken."""
    SKIPPED = "skipped"
    """No step: the gradient was not finite. In fp16 the loss scale may have been lowered."""
    DISCARDED = "discarded"
    """No step: a loss was not finite, or algorithm.target_kl ended the training."""


Decisions = tuple[Mapping[str, StepDecision], ...]
"""What was decided at each mini-batch, in order: a mapping from the trainer's name."""


@dataclass(frozen=True)
class TrainerState:
    """State that learning needs to resume, besides weights, optimizer moments and loss scales.

    Learning rates and every random choice are functions of counters and of the run's seed, and the iteration
    says which prompts come next, so there is neither a generator's state nor a position in the data to save.
    """

    iteration: int
    kl_coef: float
    responses: int
    """Responses rolled out since the run began."""
    rewards: RunningMoments
    """Moments of all rewards since the run began, before shaping."""
    seed: int


@dataclass(frozen=True)
class Machine:
    """What besides the inputs may change the last bits of an update."""

    ranks: int
    zero_stage: int
    threads: int
    device: str
    versions: Mapping[str, str]
    """Versions of the packages that compute."""
    processor: str = ""
    """Models of the ranks' processors; empty where an older program learned."""

    @staticmethod
    def here(zero_stage: int) -> "Machine":
        """Return that of all ranks. Every rank takes part."""
        versions = {name: version(name) for name in _PACKAGES}
        processors = ", ".join(sorted(set(ranks.share(_processor()))))
        place = ranks.size(), zero_stage, torch.get_num_threads(), device().type
        return Machine(*place, versions, processors)

    def unlike(self, other: "Machine") -> str:
        """Return in words how this machine is not ``other``; nothing where both are alike."""
        ours, theirs = asdict(self), asdict(other)
        pairs = [(name, ours[name], theirs[name]) for name in ours if name != "versions"]
        pairs += [(name, self.versions.get(name), theirs["versions"].get(name)) for name in self.versions]
        return ", ".join(f"{name} {one} instead of {other}" for name, one, other in pairs if one != other)


def _processor() -> str:
    """Return the model of the GPU, or of the CPU with the instructions that torch uses of it."""
    if device().type == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return " ".join([*names[:1], torch.backends.cpu.get_cpu_capability()])


@dataclass(frozen=True)
class Learned:
    """What an update has learned, but for the weights. A function of its inputs and of the machine."""

    state: TrainerState
    decisions: Decisions
    skipped: int
    """Mini-batches without a step because something was not finite."""
    overflows: int
    """Steps at which fp16 lowered its loss scale."""
    stopped: bool
    """Whether algorithm.target_kl ended the training."""
    counters: Mapping[str, Mapping[str, float]]
    """Steps taken since the run began, and the state of fp16's loss scaler, by the trainer's name."""
    machine: Machine
    sums: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    """Sums over moments and weights (:mod:`stages.ppo.state.sums`), by the trainer's name."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def learned_of(context: Context, iteration: int) -> Learned:
    """Return what an update committed with its policy. Raises as :meth:`Context.json`."""
    return converted(Learned, context.json(policy_maker(iteration), PART))


def state_after(context: Context, iteration: int) -> TrainerState:
    """Return the state that the iteration after ``iteration`` begins with."""
    kl = context.config.algorithm.kl
    if iteration == 0:
        return TrainerState(0, kl.coef, 0, RunningMoments(), context.config.seed)
    return resumed(learned_of(context, iteration).state, kl)


def resumed(state: TrainerState, kl: KLConfig) -> TrainerState:
    """Return the state to resume from. A fixed KL coefficient is the configuration's: a fork may have
    another one."""
    return replace(state, kl_coef=kl.coef) if kl.controller is KLController.FIXED else state
