"""Probe jobs of ``validate``: whether jobs find what they need on compute nodes."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config.issue import ConfigError, ConfigIssue
from pipeline.config.job_kinds import DRIVER
from pipeline.config.reward import RewardModelConfig
from pipeline.config.scheduler import ResourcesConfig, key_of, resources_of
from pipeline.config.schema import Config
from pipeline.executors.slurm.resources import Escalation, command_words, sbatch_options
from pipeline.preflight.cluster import check_cluster, job_kinds_used, needs_of
from pipeline.preflight.disk_need import existing_folder
from slurm.probe import Answer, Probe, ProbeTimeout, run_probes

PROBE_SECONDS = 120.0
_LEFT_OUT = (
    *("time", "mem", "cpus-per-task", "nodes", "ntasks-per-node", "signal"),
    *("mail-type", "mail-user"),
)
"""sbatch options that probes leave out: resources they need not wait for, and mail that nobody wants."""
_PACKAGES = ("slurm", "pipeline", "stages")
_LIBRARIES = ("?torch", "?transformers", "?deepspeed")
_DRIVER_PROGRAMS = ("sbatch --version", "squeue --version", "scontrol ping")


@dataclass(frozen=True)
class Aim:
    """Job kinds that share a probe, as their jobs have the same options, interpreter and environment."""

    stages: tuple[str, ...]
    given: ResourcesConfig

    @property
    def name(self) -> str:
        return "-".join(self.stages)


def ask_nodes(
    config: Config, seconds: float = PROBE_SECONDS, measures_delay: bool = False
) -> list[tuple[Aim, Answer]]:
    """Send a tiny job to every place that stages go to, and wait for the answers."""
    aims = aims_of(config)
    probes = [replace(probe_of(config, aim), measures_delay=measures_delay) for aim in aims]
    place = existing_folder(Path(config.run_dir).absolute().parent)
    answers = run_probes(probes, place, Path.cwd(), seconds, note)
    return [(aim, answers[aim.name]) for aim in aims]


def note(line: str) -> None:
    """Tell a person on standard error, where it is in nobody's way, what is being waited for."""
    print(line, file=sys.stderr, flush=True)


def validate_cluster(config: Config, with_probe: bool) -> Iterator[str]:
    """Check the cluster for ``validate``. Yields lines for people. Raises ConfigError with every problem."""
    check_cluster(config)
    yield "cluster: partitions, limits and sizes allow what is asked for"
    if with_probe:
        judged = [(aim, answer, list(judge(aim, answer))) for aim, answer in ask_nodes(config)]
        yield from (describe(aim, answer) for aim, answer, found in judged if not found)
        if problems := [problem for *_, found in judged for problem in found]:
            raise ConfigError("\n".join(map(str, problems)))


def aims_of(config: Config) -> list[Aim]:
    """Group the job kinds by options, interpreter, container, setup and environment. Pure."""
    given = config.slurm
    assert given
    groups: dict[object, list[str]] = {}
    for stage in job_kinds_used(config):
        resources = resources_of(given, stage)
        key = (tuple(options_of(resources).items()), words_of(resources), resources.setup, stage == DRIVER)
        groups.setdefault((key, tuple(resources.environment.items())), []).append(stage)
    return [Aim(tuple(stages), resources_of(given, stages[0])) for stages in groups.values()]


def options_of(given: ResourcesConfig) -> dict[str, str | int | bool]:
    options = sbatch_options(given, Escalation(), None)
    return {name: value for name, value in options.items() if name not in _LEFT_OUT}


def words_of(given: ResourcesConfig) -> tuple[str, ...]:
    """Return the interpreter's command in its container, as for tasks but without srun."""
    assert given.python is not None
    words = command_words(given, "")
    before = words[: words.index(given.python)]
    container = before[5:] if before[:1] == ["srun"] else before
    return (*container, given.python)


def probe_of(config: Config, aim: Aim) -> Probe:
    is_driver = DRIVER in aim.stages
    return Probe(
        name=aim.name,
        options=options_of(aim.given),
        command=words_of(aim.given),
        modules=_PACKAGES if is_driver else (*_PACKAGES, *_LIBRARIES),
        paths=() if is_driver else tuple(paths_of(config)),
        programs=_DRIVER_PROGRAMS if is_driver else (),
        setup=aim.given.setup or (),
        environment=aim.given.environment,
    )


def paths_of(config: Config) -> Iterator[str]:
    """Yield the paths of models and data that compute nodes must see."""
    given = (config.model.policy, config.model.reference, config.model.critic)
    yield from filter(None, (*given, config.data.prompts, *config.data.heldout_sets.values()))
    for component in config.reward.components.values():
        if isinstance(component, RewardModelConfig):
            yield component.path


def judge(aim: Aim, answer: Answer) -> Iterator[ConfigIssue]:
    """Find in a probe's answer what would keep the jobs of its job kinds from working. Pure."""
    key = key_of(aim.stages[0])
    partition = ",".join(aim.given.partition) or "default"
    if isinstance(answer, ProbeTimeout):
        if not answer.is_late:
            yield ConfigIssue(f"{key}.partition", partition, answer.why)
        return
    at = f"on node {answer.node}"
    if answer.missing_modules:
        each = (f"{name.removeprefix('?')} ({why})" for name, why in answer.missing_modules.items())
        yield ConfigIssue(f"{key}.python", aim.given.python, f"cannot be imported {at}: {', '.join(each)}")
    lacks = [f"{path} does not exist {at}; use a shared filesystem" for path in answer.missing_paths]
    unusable = answer.unreachable.items()
    lacks += [f"{command.split()[0]} cannot be used {at}: {why}" for command, why in unusable]
    yield from (ConfigIssue(f"{key}.partition", partition, why) for why in lacks)
    wanted = gpus_wanted(aim.given)
    if answer.gpus is not None and answer.gpus != wanted:
        told = f"{answer.gpus} GPUs are visible {at}, {wanted} were asked for"
        yield ConfigIssue(f"{key}.gpus_per_node", aim.given.gpus_per_node, told)


def gpus_wanted(given: ResourcesConfig) -> int:
    """Return the number of GPUs wanted on each node."""
    needs = needs_of(given)
    return max((need.count for need in needs if need.device.startswith("gpu")), default=0)


def describe(aim: Aim, answer: Answer) -> str:
    """Return one line on a probe that found nothing wrong."""
    stages = ", ".join(aim.stages)
    if isinstance(answer, ProbeTimeout):
        return f"warning: {stages}: not probed, its job had to wait too long ({answer.why})"
    gpus = f"GPUs: {answer.gpus or 0}" if answer.gpus or not gpus_wanted(aim.given) else "GPUs not visible"
    return f"{stages}: ok on node {answer.node}, Python {answer.python}, {gpus}"
