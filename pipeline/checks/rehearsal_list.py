"""Which checks the rehearsal has, which of them a job kind needs, and what they show without a GPU. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeline.checks.finding import Finding, Verdict, skipped
from pipeline.config.issue import ConfigError
from pipeline.run.tasks import Stage

DRIVER = "driver"
"""Name of the check without which no other that computes makes sense."""
_TRANSFORMERS, _VLLM = "transformers", "vllm"
"""Names of the checks of each engine's numbers."""
RANKS = 2
"""Ranks of the checks that have several, where a job has no number of its own."""


class Role(StrEnum):
    """What a job kind does with a model."""

    GENERATES = "generates"
    TRAINS = "trains"
    COMPUTES = "computes"
    """Any of them."""


@dataclass(frozen=True)
class RehearsalCheck:
    """One check of the rehearsal."""

    name: str
    function: str
    """Check in :mod:`stages.rehearsal`, as ``module:function``."""
    about: str
    on_cpus: str
    """What it shows where there is no GPU; empty for nothing."""
    role: Role = Role.COMPUTES
    limit: float = 300.0
    """Seconds that it may take: an import alone may take minutes on a busy shared filesystem."""
    is_short: bool = False
    is_plain: bool = False
    """Whether its process is started afresh, as by Slurm; else it is forked as on one machine."""
    sizes: tuple[int, ...] = (1,)
    """Numbers of ranks with which it is made, one after the other. Several are as many as a job has."""
    devices: int = 1
    """GPUs of each rank."""
    kills: bool = False
    """Whether it kills one of its ranks."""


_STAGES = "stages.rehearsal"
_NUMBERS = "numbers of CPU kernels"
_VLLM_SECONDS = 600.0
"""Limit of checks with vLLM, which alone imports for a minute on a busy machine, in each of its processes."""
_HOST_MEMORY = "the end of the host's memory"
CHECKS = (
    RehearsalCheck(
        DRIVER,
        f"{_STAGES}.devices:driver",
        "libraries, card, capability, bf16 and an allocation in a new process",
        "that libraries can be imported",
        is_short=True,
        is_plain=True,
    ),
    RehearsalCheck(
        "forked",
        f"{_STAGES}.devices:forked",
        "an allocation in a process forked from the preloading server",
        "that forked processes compute",
        is_short=True,
    ),
    RehearsalCheck(
        "spawned",
        f"{_STAGES}.devices:spawned",
        "an allocation in a process that a task spawns",
        "that spawned processes compute",
        is_short=True,
    ),
    RehearsalCheck(
        "device-names",
        f"{_STAGES}.devices:device_names",
        "a device by its number and UUID, or by its MIG name",
        "",
    ),
    RehearsalCheck(
        "storage",
        f"{_STAGES}.storage:storage",
        "a policy-size file written, flushed, and read by another process and node",
        "all of it",
        is_short=True,
        is_plain=True,
    ),
    RehearsalCheck(
        _TRANSFORMERS,
        f"{_STAGES}.engines:transformers_numbers",
        "log-probabilities, seeds, reload and abort of transformers' engine",
        _NUMBERS,
        Role.GENERATES,
        is_short=True,
    ),
    RehearsalCheck(
        _VLLM,
        f"{_STAGES}.engines:vllm_numbers",
        "the same of vLLM, and which model runner it takes",
        f"{_NUMBERS}, of the runner for CPUs",
        Role.GENERATES,
        limit=_VLLM_SECONDS,
    ),
    RehearsalCheck(
        "vllm-reload",
        f"{_STAGES}.engines:vllm_reloads",
        "new weights in vLLM of a model whose layers share one, and another adapter",
        f"{_NUMBERS}, of the runner for CPUs",
        Role.GENERATES,
        limit=_VLLM_SECONDS,
    ),
    RehearsalCheck(
        "vllm-split",
        f"{_STAGES}.engines:vllm_split",
        "log-probabilities, seeds, reload and abort of a model that two GPUs share",
        f"{_NUMBERS}, of the runner for CPUs, with gloo and shared memory",
        Role.GENERATES,
        limit=_VLLM_SECONDS,
        devices=2,
    ),
    RehearsalCheck(
        "second-engine",
        f"{_STAGES}.engines:second_engine",
        "free memory after an engine was closed; a second one beside a trainer",
        "that a second engine starts",
        Role.GENERATES,
        limit=_VLLM_SECONDS,
    ),
    RehearsalCheck(
        "side-by-side",
        f"{_STAGES}.beside:side_by_side",
        "a reward model in vLLM and the reference, in turn in one process: neither is loaded again",
        "that they stay, not that a card has room",
        Role.GENERATES,
        limit=_VLLM_SECONDS,
    ),
    RehearsalCheck(
        "warned-generation",
        f"{_STAGES}.engines:warned_generation",
        "SIGUSR2 while transformers' engine generates",
        "all of it",
        Role.GENERATES,
    ),
    RehearsalCheck(
        "warned-vllm",
        f"{_STAGES}.engines:warned_vllm",
        "SIGUSR2 while vLLM generates",
        "all of it, with the runner for CPUs",
        Role.GENERATES,
        limit=_VLLM_SECONDS,
    ),
    RehearsalCheck(
        "memory-generation",
        f"{_STAGES}.memory:generation",
        "memory of transformers' engine with batches of two sizes, beside the formulas",
        "the formulas, on CPUs",
        Role.GENERATES,
    ),
    RehearsalCheck(
        "memory-vllm",
        f"{_STAGES}.memory:vllm",
        "memory of vLLM's start, and its cache for a token, beside the formulas",
        "the cache, and the start on CPUs",
        Role.GENERATES,
        limit=_VLLM_SECONDS,
    ),
    RehearsalCheck(
        "full-card-generation",
        f"{_STAGES}.full:generation",
        "out of memory provoked while generating",
        _HOST_MEMORY,
        Role.GENERATES,
    ),
    RehearsalCheck(
        "full-card-scoring",
        f"{_STAGES}.full:scoring",
        "out of memory provoked while scoring",
        _HOST_MEMORY,
        Role.GENERATES,
    ),
    RehearsalCheck(
        "speed-generation",
        f"{_STAGES}.speed:generation",
        "tokens per second of vLLM, beside those of its bare loop",
        "that they are measured",
        Role.GENERATES,
        limit=_VLLM_SECONDS,
    ),
    RehearsalCheck(
        "own-device",
        f"{_STAGES}.devices:own_device",
        "names of devices, and one of its own for each rank",
        "names, where there are some",
        Role.TRAINS,
        sizes=(RANKS,),
    ),
    RehearsalCheck(
        "zero",
        f"{_STAGES}.training:same_loss",
        "losses of several ranks against one, by ZeRO stage, precision and offload",
        "the sums of gloo, not of NCCL",
        Role.TRAINS,
        limit=600.0,
        is_short=True,
        sizes=(1, RANKS),
    ),
    RehearsalCheck(
        "rows",
        f"{_STAGES}.training:rows",
        "packed and padded rows with each attention",
        "eager, sdpa, and flex attention where a C++ compiler is",
        Role.TRAINS,
        limit=600.0,
    ),
    RehearsalCheck(
        "all-reduce",
        f"{_STAGES}.nodes:all_reduce",
        "bandwidth and interface between ranks, of all nodes of a job",
        "the network that gloo takes, not NCCL's",
        Role.TRAINS,
        sizes=(RANKS,),
    ),
    RehearsalCheck(
        "killed-rank",
        f"{_STAGES}.nodes:killed_rank",
        "seconds until all ranks have ended after one was killed",
        "all of it, with gloo",
        Role.TRAINS,
        sizes=(RANKS,),
        kills=True,
    ),
    RehearsalCheck(
        "warned-training",
        f"{_STAGES}.training:warned_training",
        "SIGUSR2 while training",
        "all of it",
        Role.TRAINS,
    ),
    RehearsalCheck(
        "deterministic-cost",
        f"{_STAGES}.determinism:cost",
        "seconds of an update with deterministic kernels, and without",
        "that both compute",
        Role.TRAINS,
        limit=600.0,
    ),
    RehearsalCheck(
        "host-copies",
        f"{_STAGES}.copies:host_copies",
        "GB/s of copies to the host, into new memory, page-locked or not",
        "",
        Role.TRAINS,
    ),
    RehearsalCheck(
        "memory-training",
        f"{_STAGES}.memory:training",
        "memory of an update with micro-batches of two sizes, beside the formulas",
        "the formulas, on CPUs",
        Role.TRAINS,
    ),
    RehearsalCheck(
        "speed-training",
        f"{_STAGES}.speed:training",
        "tokens per second of an update, and its share of the card's peak",
        "that they are measured",
        Role.TRAINS,
        limit=600.0,
    ),
    RehearsalCheck(
        "full-card-training",
        f"{_STAGES}.full:training",
        "out of memory provoked while training",
        _HOST_MEMORY,
        Role.TRAINS,
    ),
)
_ROLES: Mapping[str, frozenset[Role]] = {
    Stage.UPDATE: frozenset({Role.COMPUTES, Role.TRAINS}),
    Stage.ROLLOUT: frozenset({Role.COMPUTES, Role.GENERATES}),
    Stage.EVALUATE: frozenset({Role.COMPUTES, Role.GENERATES}),
    Stage.REWARD: frozenset({Role.COMPUTES, Role.GENERATES}),
}


def chosen(
    only: Sequence[str], is_short: bool, kinds: Collection[str] | None = None, needs_vllm: bool = False
) -> tuple[str, ...]:
    """Return the names of the checks to make.

    Args:
        only: names that were asked for; none for all.
        kinds: job kinds that run in a place; None for all of them.
        needs_vllm: whether they use vLLM, whose numbers the short list then has instead of transformers'.

    Raises:
        ConfigError: there is no check of a name.
    """
    legal = [check.name for check in CHECKS]
    if unknown := [name for name in only if name not in legal]:
        raise ConfigError(f"--only: there is no check {unknown[0]}; choose of {', '.join(legal)}")
    wanted = set(only) or (_short(needs_vllm) if is_short else set(legal))
    roles = set(Role) if kinds is None else {role for kind in kinds for role in roles_of(kind)}
    return tuple(check.name for check in CHECKS if check.role in roles and check.name in wanted)


def _short(needs_vllm: bool) -> set[str]:
    """Return the names of the short list, which has one engine."""
    found = {check.name for check in CHECKS if check.is_short}
    return found - {_TRANSFORMERS} | {_VLLM} if needs_vllm else found


def roles_of(kind: str) -> frozenset[Role]:
    """Return the roles of a job kind; one of a pool has reward's."""
    return _ROLES.get("reward" if kind.startswith("score-") else kind, frozenset({Role.COMPUTES}))


def without_gpus(found: Sequence[Finding]) -> Finding:
    """Say what a rehearsal has shown without a GPU. Pure."""
    of = {check.name: check for check in CHECKS}
    shown = [one.title for one in found if one.verdict is Verdict.OK and of[one.title].on_cpus]
    proved = "; ".join(f"{name}: {of[name].on_cpus}" for name in shown) or "nothing"
    return skipped("GPUs", f"not shown here: none is used. What CPUs have shown: {proved}")
