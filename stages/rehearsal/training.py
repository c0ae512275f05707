"""Checks of the update: its losses by several ranks, in every ZeRO stage and number format, and its rows."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.config.update import Precision
from stages import ranks
from stages.context import Stopwatch, UserError
from stages.models.devices import device
from stages.models.loading import load_causal_lm
from stages.ppo.experience import Experience
from stages.ppo.forward import check_packing
from stages.ppo.learner import update
from stages.ppo.math.shaping import RunningMoments
from stages.ppo.trainer import Trainer
from stages.ppo.training import Learner, Steps
from stages.process.preemption import listen
from stages.rehearsal.allocation import half_precision
from stages.rehearsal.answers import CheckFailed, CheckInput, Shown, with_torch
from stages.rehearsal.meeting import meet
from stages.rehearsal.models import CONTEXT, config_of, policy, random_experience

_ROWS = 16
_VOCABULARY = 256
_TOLERANCE = {Precision.FP32: 1e-4, Precision.BF16: 5e-2, Precision.FP16: 1e-2}
"""Largest difference of losses and gradient norms from those of one rank, relative to the largest."""
_ATTENTIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2")
_COMPILED = "flex_attention"
"""Attention whose kernels are compiled at the first call, by compilers that a node may lack."""
_SAID = 200
"""Characters of a library's error message that are quoted."""
_PACKED_BY_ITSELF = "flash_attention_2"
_KEPT, _MIXED = "keeps rows apart", "does not keep rows apart"


@dataclass(frozen=True)
class Case:
    """One way to train."""

    zero_stage: int
    precision: Precision
    offload: bool = False

    def __str__(self) -> str:
        return f"ZeRO {self.zero_stage} {self.precision}{' offload' if self.offload else ''}"

    @property
    def words(self) -> list[str]:
        return [
            f"update.zero_stage={self.zero_stage}",
            f"update.precision={self.precision}",
            f"update.offload_optimizer={self.offload}",
        ]


def cases(is_short: bool, half: Precision) -> list[Case]:
    """Return all ways that a configuration may name, or of the short list the ends: ZeRO 0 and 3. Without
    ZeRO there are neither half precision nor offload. Pure.

    Args:
        half: the half precision that the device computes in.
    """
    exact, rounded = ((0, 3), (3,)) if is_short else ((0, 1, 2, 3), (1, 2, 3))
    found = [Case(stage, Precision.FP32) for stage in exact] + [Case(stage, half) for stage in rounded]
    return found if is_short else [*found, Case(2, Precision.FP32, True), Case(3, Precision.FP32, True)]


@with_torch
def same_loss(given: CheckInput) -> Shown:
    """Check that several ranks have the losses and gradients of one, which is called first."""
    meet()
    found, tried = {}, cases(given.is_short, half_precision())
    for case in tried:
        print(f"{case}, {ranks.size()} ranks", flush=True)  # what a check that hangs hangs in
        found[str(case)] = losses(given.folder, case)
    kept = given.folder / "losses-of-one-rank.json"
    if ranks.size() == 1:
        kept.write_text(json.dumps(found))
        return Shown(f"{len(found)} updates by one rank")
    alone = json.loads(kept.read_text())
    errors = {str(case): error(found[str(case)], alone[str(case)]) for case in tried}
    too_far = [f"{case} {errors[str(case)]:.1e}" for case in tried if is_far(case, errors)]
    if too_far:
        raise CheckFailed(
            f"losses of {ranks.size()} ranks differ from one rank's: {', '.join(too_far)}",
            "set NCCL_DEBUG=WARN and try again; do not train with this ZeRO stage on this partition",
        )
    worst = max(errors, key=lambda case: errors[case])
    numbers = {f"error/{case}": value for case, value in errors.items()}
    measured = f"{len(errors)} ways: {ranks.size()} ranks have one rank's losses, {worst} differs most, by "
    return Shown(f"{measured}{errors[worst]:.1e}", numbers)


def is_far(case: Case, errors: dict[str, float]) -> bool:
    return not errors[str(case)] <= _TOLERANCE[case.precision]


def error(found: list[float], expected: list[float]) -> float:
    """Return the largest difference, relative to the largest number."""
    if len(found) != len(expected):
        return float("inf")
    largest = max(map(abs, expected))
    return max(abs(one - other) for one, other in zip(found, expected, strict=True)) / largest


def losses(folder: Path, case: Case) -> list[float]:
    """Return loss and gradient norm of each step of an update."""
    steps = trained(folder, *case.words)
    return [sums["policy_loss"] / steps.tokens for sums in steps.sums] + list(steps.policy_norms)


def trained(folder: Path, *words: str) -> Steps:
    """Return the steps of an update of a tiny policy; its memory is given back."""
    learner = learner_of(folder, *words)
    try:
        return update_of(learner)
    finally:
        learner.policy.free()


def learner_of(folder: Path, *words: str) -> Learner:
    """Return a policy under DeepSpeed, and no critic; ``words`` are of the configuration."""
    meet()
    config = config_of(
        folder,
        f"data.prompts_per_iteration={_ROWS}",
        "update.minibatches=2",
        "update.tokens_per_micro_batch=256",
        *words,
    )
    model = load_causal_lm(config.model.policy, config.update.precision, trust_remote_code=False)
    return Learner(config, Trainer("policy", model, config.update.learning_rate, config.update), None)


def update_of(learner: Learner, iteration: int = 1, given: Experience | None = None) -> Steps:
    """Return the steps of an update, by random responses unless others are given."""
    experience = given or random_experience(_ROWS, _VOCABULARY, CONTEXT)
    moments = RunningMoments().including(experience.outcome.scores)
    return update(learner, experience, iteration, 0.0, moments, Stopwatch()).steps


@with_torch
def rows(given: CheckInput) -> Shown:
    """Check with each attention whether rows laid end to end are kept apart, as padded ones are."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(given.folder / "compiled"))  # goes with the folder
    found = {attention: packed_with(given.folder, attention) for attention in _ATTENTIONS}
    if found[_PACKED_BY_ITSELF] == _MIXED:
        raise CheckFailed(
            "flash attention does not keep rows apart that are laid end to end",
            "set update.remove_padding=false",
        )
    return Shown("; ".join(f"{name} {said}" for name, said in found.items()))


def packed_with(folder: Path, attention: str) -> str:
    """Return whether packed rows have the numbers of padded ones with an attention, or why they were not
    compared."""
    if reason := why_not(attention):
        return f"was not tried: {reason}"
    precision = half_precision() if attention == _PACKED_BY_ITSELF else Precision.FP32
    try:
        model = load_causal_lm(policy(folder), precision, False, attention=attention)
    except UserError as error:
        return f"was not tried: {first_sentence(error.__cause__ or error)}"
    shortest = random_experience(2, _VOCABULARY, CONTEXT).rows
    try:
        check_packing(model, (shortest[0], shortest[1]), device())
    except UserError:
        return _MIXED
    except Exception as error:  # whatever a compiler and torch's around it raise
        if attention != _COMPILED:
            raise
        return f"cannot be compiled here: {type(error).__name__}: {first_sentence(error)}"
    return _KEPT


def why_not(attention: str) -> str:
    """Return why this process's device has no kernels of an attention; empty if it has."""
    if attention != _PACKED_BY_ITSELF:
        return ""
    if not torch.cuda.is_available():
        return "no GPU"
    return "it needs compute capability 8.0" if half_precision() is Precision.FP16 else ""


def first_sentence(error: BaseException) -> str:
    return " ".join(str(error).split()).partition(". ")[0][:_SAID]


@with_torch
def warned_training(given: CheckInput) -> Shown:
    """Check that an update goes on at Slurm's warning, since what it has done would be lost."""
    expected = trained(given.folder, "update.zero_stage=0").policy_norms
    listen(can_save=False)
    learner = learner_of(given.folder, "update.zero_stage=0")
    os.kill(os.getpid(), signal.SIGUSR2)
    found = update_of(learner).policy_norms
    if found != expected:
        raise CheckFailed("an update that was warned has other gradients", "report this, with the run's log")
    return Shown("an update goes on at SIGUSR2, to the same gradients")
