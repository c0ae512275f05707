"""Settings that are ``auto``, decided once from the configuration, what is installed, and the GPUs: which
engine generates, in which number format each stage computes, and how many tokens an update does at once. Pure
but for :func:`facts_of`.

A run's frozen configuration holds the decided words, so that no later command or task decides again.
"""

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeline.config.algorithm import ReferenceStage
from pipeline.config.allocation import StepConfig
from pipeline.config.engine_rules import has_reference_in, scores_with
from pipeline.config.engines import AUTO, Engine
from pipeline.config.installed import Packages, packages_of
from pipeline.config.model_files import architectures_of, read_json
from pipeline.config.rules import contradictions
from pipeline.config.scheduler import LocalConfig, ResourcesConfig, SlurmConfig
from pipeline.config.schema import Config
from pipeline.config.update import HALF, MICRO_BATCH, Precision
from pipeline.gpus import CardHere, has_gpus, nvidia_cards, unknown_to_vllm, visible_names

_AMPERE, _VOLTA = (8, 0), (7, 0)
"""Compute capabilities: first with bf16 arithmetic, and first that vLLM computes on."""
_OLDER = {
    r"titan_v|v100s?": (7, 0),
    r"t4|rtx_?20[678]0|quadro_rtx_[568]000": (7, 5),
    r"p100": (6, 0),
    r"p4|p40|gtx_?10\d0": (6, 1),
    r"k80|m40|m60": (5, 2),
}
"""Names of GPUs below compute capability 8.0, in lower case. Any other counts as one that has it."""
_NEWER = (
    r"a(?:2|10g?|16|30|40|100|800)|a[2-6]000|l(?:4|20|40s?)|h(?:20|100|200|800)|g[hb][1-3]00|b[1-3]00|mi[1-3]\d\d[axp]?"
    r"|rtx_?[345]0[5-9]0|rtx_?(?:a\d{4}|\d{4}_ada|pro_\d{4})"
)
"""Names of GPUs that have bf16 for certain. Of others, and of those that are not named, it is assumed."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a stage's tasks."""

    why: str
    """The setting or fact that says so, in words."""
    count: bool = True
    """Whether there are any."""
    card: str = ""
    """Name of the card of the least capability; empty where the settings name none."""
    capability: tuple[int, int] | None = None
    """Its compute capability, where that is known to be below 8.0."""

    is_seen: bool = False
    """Whether the driver of this machine has said their capability."""

    @property
    def has_bf16(self) -> bool:
        return self.count and (self.capability is None or self.capability >= _AMPERE)

    @property
    def assumption(self) -> str:
        """What :attr:`has_bf16` takes for granted, in words; empty where it is known."""
        if not self.has_bf16 or self.is_seen or _is_named(_NEWER, self.card):
            return ""
        which = (
            f"{self.card} is an unknown card, and is" if self.card else "their type is not given, so they are"
        )
        return f"{which} taken to have bf16"


@dataclass(frozen=True)
class Hardware:
    """What is known of the machines that tasks run on."""

    gpus: Mapping[str, Gpus]
    """GPUs by the key of the stage or pool below ``scheduler``."""
    packages: Packages
    """What is installed for rollout tasks."""
    is_cpu_torch: bool = False
    """Whether the update's torch is built for CPUs."""
    names: tuple[str, ...] = ()
    """Names of the GPUs that tasks of this machine are given; none elsewhere."""


@dataclass(frozen=True)
class Decision:
    """The value of one key that was auto."""

    key: str
    value: str | int
    why: str


# --- what is known ---


def has_auto(config: Config) -> bool:
    """Whether any setting is auto."""
    update = config.update
    others = config.rollout.engine, update.zero_stage, update.tokens_per_micro_batch
    return AUTO in (*others, *map(str, _precisions(config)))


def _precisions(config: Config) -> tuple[Precision | None, ...]:
    return config.update.precision, config.rollout.precision, config.reward.precision


def facts_of(config: Config) -> Hardware:
    """Look at the settings, at what is installed, and on this machine's own runs at its GPUs."""
    given = config.scheduler
    packages, update = packages_of(config, "rollout"), packages_of(config, "update")
    if isinstance(given, LocalConfig):
        names = given.gpus if isinstance(given.gpus, tuple) else visible_names(os.environ) or ()
        here = gpus_here(given, has_gpus() and visible_names(os.environ) != (), nvidia_cards())
        stages = {"rollout": given.rollout, "evaluate": given.evaluate, "reward": given.reward}
        stages |= {"update": given.update, **{f"pools.{name}": one for name, one in given.pools.items()}}
        found = {
            key: Gpus(f"scheduler.{key}.gpus=0", False) if share.gpus == 0 else here
            for key, share in stages.items()
        }
        return Hardware(found, packages, update.is_cpu_torch, names)
    shared = given.options if isinstance(given, SlurmConfig) else {}
    asked = {key: asked_gpus(one, shared) for key, one in given.resources.items()}
    return Hardware(asked, packages, update.is_cpu_torch)


def gpus_here(given: LocalConfig, is_any: bool, cards: tuple[CardHere, ...]) -> Gpus:
    """Return the GPUs of tasks on this machine. Pure."""
    if given.gpus == 0:
        return Gpus("scheduler.gpus=0", False)
    if not (is_any or isinstance(given.gpus, tuple)):
        return Gpus("no GPU here", False)
    oldest = min(cards, key=lambda card: card.capability, default=None)
    if oldest is None:
        return Gpus("GPUs here")
    old = oldest.capability if oldest.capability < _AMPERE else None
    return Gpus(oldest.name, True, oldest.name, old, is_seen=True)


def asked_gpus(given: StepConfig, shared: Mapping[str, object]) -> Gpus:
    """Return the GPUs that a stage's jobs, or steps of an allocation, ask for. Pure.

    Args:
        shared: sbatch options of every job.
    """
    gres = given.gres if isinstance(given, ResourcesConfig) else None
    if gres and "gpu" in gres:
        name = re.search(r"gpu:([A-Za-z][^:,]*)", gres)
        return _named(f"gres={gres}", name[1] if name else "")
    options = {"gpus_per_node": given.gpus_per_node, **shared, **given.options}
    for key, asked in options.items():
        if asked and key.startswith("gpus"):
            return _named(f"{key}={asked}", str(asked).rpartition(":")[0])
    return Gpus("no GPUs asked for", False)


def _named(why: str, card: str) -> Gpus:
    return Gpus(why, True, card, capability_named(card))


def capability_named(card: str) -> tuple[int, int] | None:
    """Return the compute capability of a card below 8.0 by its name in a cluster's GRES; None of others, and
    of those that are not known. Pure."""
    return next((capability for names, capability in _OLDER.items() if _is_named(names, card)), None)


def _is_named(names: str, card: str) -> bool:
    """Whether a card's name in a cluster's GRES holds one of some names."""
    plain = re.sub(r"[- ]", "_", card.lower())
    return bool(re.search(rf"(?<![a-z0-9])({names})(?![0-9])", plain))


# --- what follows ---


def decide(given: Config, facts: Hardware) -> list[Decision]:
    """Decide every setting that is auto. Pure, but for the policy's config.json."""
    config, found = given, list[Decision]()
    for decided in _DECIDED:
        new = list(decided(config, facts, given.update.precision is not Precision.AUTO))
        config = with_decisions(config, new)
        found += new
    return found


def with_decisions(config: Config, decisions: list[Decision]) -> Config:
    """Return a configuration with decided values. Pure."""
    for one in decisions:
        section, _, name = one.key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: one.value})})
    return config


def as_decided(config: Config, keys: Iterable[str], before: Config) -> Config:
    """Return a configuration with what was decided before of keys that are auto. Pure."""

    def value_of(key: str) -> Any:
        return functools.reduce(getattr, key.split("."), before)

    return with_decisions(config, [Decision(key, value_of(key), "") for key in keys])


def in_words(decisions: list[Decision]) -> str:
    """Return what was decided in one line: words that set the same, each with its reason; empty for nothing.
    Pure."""
    groups = groupby(decisions, key=lambda one: one.why)
    parts = [f"{', '.join(f'{one.key}={one.value}' for one in several)} ({why})" for why, several in groups]
    return f"auto: {', '.join(parts)}" if parts else ""


def _engine(config: Config, facts: Hardware, is_said: bool) -> Iterator[Decision]:
    if config.rollout.engine != AUTO:
        return
    why_not = _why_not_vllm(config, facts)
    if why_not:
        yield Decision("rollout.engine", str(Engine.TRANSFORMERS), why_not)
    else:
        why = f"{facts.packages.vllm} is installed, {facts.gpus['rollout'].why}"
        yield Decision("rollout.engine", str(Engine.VLLM), f"vLLM {why}")


def _why_not_vllm(config: Config, facts: Hardware) -> str:
    """Return why vLLM is not taken; empty where it is."""
    packages, evaluates = facts.packages, config.evaluate.every and config.data.has_heldout
    for stage in ("rollout", *(("evaluate",) if evaluates else ())):
        gpus = facts.gpus[stage]
        if not gpus.count:
            return gpus.why if stage == "rollout" else f"{stage}, which generates too: {gpus.why}"
        if gpus.capability and gpus.capability < _VOLTA:
            return f"vLLM needs compute capability 7.0, and {gpus.card} has less"
    if packages.unseen:
        return f"{packages.unseen}; rollout.engine=vllm if vLLM is there"
    if packages.vllm is None:
        return "vLLM is built for CPUs" if packages.is_cpu_vllm else "vLLM is not installed"
    return _why_vllm_refuses(config, facts)


def _why_vllm_refuses(config: Config, facts: Hardware) -> str:
    """Return what of the settings, or of the model, does not go with vLLM; empty where all does."""
    if isinstance(config.scheduler, LocalConfig):
        if config.scheduler.gpus == "shared":
            return "scheduler.gpus=shared: vLLM takes most of a GPU that others use"
        if problem := unknown_to_vllm(facts.names):
            return problem
    known = facts.packages.models
    settings = read_json(Path(config.model.policy) / "config.json") or {}
    missing = [name for name in architectures_of(settings) if known is not None and name not in known]
    if missing:
        return f"vLLM {facts.packages.vllm} has no {missing[0]}"
    own, other = (
        [str(one) for one in contradictions(replace(config, rollout=replace(config.rollout, engine=engine)))]
        for engine in (Engine.VLLM, Engine.TRANSFORMERS)
    )
    return next((f"not vllm: {line.split(';')[0]}" for line in own if line not in other), "")


def _update_precision(config: Config, facts: Hardware, is_said: bool) -> Iterator[Decision]:
    if config.update.precision is not Precision.AUTO:
        return
    gpus, fp32 = facts.gpus["update"], Precision.FP32
    if not gpus.count:
        yield Decision("update.precision", fp32, gpus.why)
    elif facts.is_cpu_torch:
        yield Decision("update.precision", fp32, "torch is built for CPUs")
    elif not gpus.has_bf16:
        why = f"{gpus.card} has no bf16; update.precision=fp16 is faster and needs a loss scale"
        yield Decision("update.precision", fp32, why)
    elif config.update.zero_stage == 0:
        yield Decision("update.precision", fp32, "update.zero_stage=0 sums gradients in this format")
    else:
        yield Decision("update.precision", Precision.BF16, _assuming(gpus.why, gpus))


def _assuming(why: str, gpus: Gpus) -> str:
    """Return why something is bf16 on some GPUs, with what that takes for granted."""
    return f"{why}; {gpus.assumption}" if gpus.assumption else why


def _micro_batch(config: Config, facts: Hardware, is_said: bool) -> Iterator[Decision]:
    if config.update.tokens_per_micro_batch == AUTO:
        gpus = facts.gpus["update"]
        is_gpu = gpus.count and not facts.is_cpu_torch
        why = "torch is built for CPUs" if gpus.count and not is_gpu else gpus.why
        yield Decision("update.tokens_per_micro_batch", MICRO_BATCH["gpu" if is_gpu else "cpu"], why)


def _rollout_precision(config: Config, facts: Hardware, is_said: bool) -> Iterator[Decision]:
    """Yield the update's format, or bf16 with vLLM, but where the rollout's hardware has another.

    Args:
        is_said: whether the user has given update.precision: what follows from it holds without GPUs too.
    """
    if config.rollout.precision is not Precision.AUTO:
        return
    gpus, wanted, why = facts.gpus["rollout"], config.rollout_precision, "as update.precision"
    is_vllm = config.rollout.engine == Engine.VLLM
    if wanted is Precision.BF16 and gpus.count and not gpus.has_bf16:
        wanted, why = (Precision.FP16 if is_vllm else Precision.FP32), f"{gpus.card} has no bf16"
    elif wanted in HALF and not (gpus.count or is_vllm or is_said):
        wanted, why = Precision.FP32, gpus.why
    elif wanted is not config.update.precision:
        why = _assuming("vLLM's fast attention has no fp32", gpus)
    elif wanted is Precision.BF16 and gpus.assumption != facts.gpus["update"].assumption:
        why = _assuming(why, gpus)
    yield Decision("rollout.precision", wanted, why)


def _reward_precision(config: Config, facts: Hardware, is_said: bool) -> Iterator[Decision]:
    """Yield the update's format, but fp32 where a job that computes with a model does not have it."""
    if config.reward.precision is not Precision.AUTO:
        return
    wanted, why = config.reward_precision, "as update.precision"
    for gpus in (facts.gpus.get(key, facts.gpus["reward"]) for key in _scoring(config)):
        if wanted is Precision.BF16 and gpus.count and not gpus.has_bf16:
            wanted, why = Precision.FP32, f"{gpus.card} has no bf16"
        elif wanted in HALF and not (gpus.count or is_said):
            wanted, why = Precision.FP32, gpus.why
        elif wanted is Precision.BF16 and gpus.assumption != facts.gpus["update"].assumption:
            why = _assuming("as update.precision", gpus)
    yield Decision("reward.precision", wanted, why)


def _scoring(config: Config) -> list[str]:
    """Return the keys of the jobs that compute with a reward model, a teacher or the reference."""
    components = config.reward.components.values()
    keys = [f"pools.{c.pool}" if c.pool else "reward" for c in components if scores_with(config.reward, c)]
    teachers = config.reward.teachers.values()
    keys += [f"pools.{one.pool}" if one.pool else "reward" for one in teachers]
    return [*dict.fromkeys(keys + ["reward"] * has_reference_in(config, ReferenceStage.REWARD))]


def _zero_stage(config: Config, facts: Hardware, is_said: bool) -> Iterator[Decision]:
    if config.update.zero_stage == AUTO:
        why = "offload_optimizer" if config.update.offload_optimizer else str(config.update.precision)
        yield Decision("update.zero_stage", config.update.zero, why)


_DECIDED: tuple[Callable[[Config, Hardware, bool], Iterator[Decision]], ...] = (
    _engine,
    _update_precision,
    _micro_batch,
    _rollout_precision,
    _reward_precision,
    _zero_stage,
)
"""Decisions in their order: later ones look at what was decided before."""
