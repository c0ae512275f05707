"""What GPUs can compute with, by their compute capability, such as (7, 0) of a V100. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipeline.config.engines import Engine
from pipeline.config.issue import ConfigIssue
from pipeline.config.job_kinds import DRIVERS
from pipeline.config.schema import Config
from pipeline.config.update import Precision, TrainingEngine
from pipeline.run.engine_use import engines_of
from pipeline.run.tasks import Stage, task_of

Capability = tuple[int, int]
_AMPERE = (8, 0)
"""First GPUs that compute in bf16, and that flash attention has kernels for."""
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([a-z]?)")


def capability_of(text: str) -> Capability:
    """Parse ``8.6``. Raises ValueError."""
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def in_words(capability: Capability) -> str:
    return "{}.{}".format(*capability)


def is_built_for(capability: Capability, architectures: Iterable[str]) -> bool:
    """Whether a build has machine code for a GPU, or PTX that its driver compiles. An unknown build has.

    Args:
        architectures: as ``torch.cuda.get_arch_list()`` gives them: ``sm_86``, ``sm_90a``, ``compute_120``.
    """
    known = [match for each in architectures if (match := _ARCHITECTURE.fullmatch(each))]
    return not known or any(_runs(match, capability) for match in known)


def _runs(architecture: re.Match[str], capability: Capability) -> bool:
    kind, major, minor, is_exact = architecture.groups()
    built = (int(major), int(minor))
    if is_exact:
        return built == capability
    return built <= capability and (kind == "compute" or built[0] == capability[0])


def missing_code(name: str, capability: Capability, torch: str, architectures: Sequence[str]) -> str:
    """Return that a build of torch has no code for a GPU, and the way out; empty if it has.

    Args:
        name: of the GPU.
        torch: its version, with that of CUDA.
    """
    if is_built_for(capability, architectures):
        return ""
    return (
        f"torch {torch} has no code for {name} (compute capability {in_words(capability)}), but for "
        f"{', '.join(architectures)}; install a build that has: see the table in docs/howto/gpus.md"
    )


def formats_of(config: Config, *job_kinds: str) -> dict[str, str]:
    """Return what the engines that come with slurm-ppo need a GPU for in jobs of these kinds: number formats
    and attention, by the key that chooses them."""
    tasks = [task_of(1, job_kind) for job_kind in job_kinds if job_kind not in DRIVERS]
    used = [(task, *pair) for task in tasks for pair in engines_of(config, task.stage, task.pool)]
    found: dict[str, str] = {}
    for task, key, engine in used:
        if engine not in {*Engine, *TrainingEngine}:
            continue
        if key == "rollout.engine":
            found["rollout.precision"] = config.rollout_precision
        elif key != "update.engine":
            found["reward.precision"] = config.reward_precision
        elif task.stage is Stage.UPDATE:  # prepare tries on CPUs whether adapters fit
            found["update.precision"] = config.update.precision
            found["update.attention"] = config.update.attention or ""
    return found


def format_problems(formats: Mapping[str, str], capability: Capability, where: str) -> Iterator[ConfigIssue]:
    """Yield formats that a GPU does not compute in: bf16, which torch would emulate and DeepSpeed and vLLM
    refuse, and flash attention, before compute capability 8.0.

    Args:
        formats: as :func:`formats_of` gives them.
        where: place of the GPU, as in "on node gpu07".
    """
    if capability >= _AMPERE:
        return
    for key, value in formats.items():
        has = f"the GPUs {where} have compute capability {in_words(capability)}"
        if value == Precision.BF16:
            why = f"{has}, and bf16 needs 8.0; give {key}=fp16, or other GPUs"
            yield ConfigIssue(key, value, why)
        elif key == "update.attention" and value.startswith("flash"):
            yield ConfigIssue(key, value, f"{has}, and this needs 8.0; give sdpa, or other GPUs")
