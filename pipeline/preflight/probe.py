"""Probe jobs of ``validate``: whether jobs find what they need on compute nodes."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.config.issue import ConfigError, ConfigIssue
from pipeline.config.job_kinds import DRIVER
from pipeline.config.scheduler import ResourcesConfig, key_of, resources_of
from pipeline.config.schema import Config
from pipeline.executors.slurm.resources import Escalation, interpreter_words, sbatch_options
from pipeline.preflight.cluster import gpus_wanted, job_kinds_used
from pipeline.preflight.disk_need import existing_folder
from pipeline.preflight.sight import image_key, image_of, paths_of, way_in, way_to_gpus
from pipeline.run.identity import version
from slurm.clusters import on_cluster
from slurm.probe import Answer, Probe, ProbeResult, ProbeTimeout, run_probes

PROBE_SECONDS = 120.0
_LEFT_OUT = (
    *("time", "mem", "cpus-per-task", "nodes", "ntasks-per-node", "signal"),
    *("mail-type", "mail-user"),
)
"""sbatch options that probes leave out: resources they need not wait for, and mail that nobody wants."""
_PACKAGES = ("slurm", "pipeline", "stages")
_LIBRARIES = ("?torch", "?transformers", "?deepspeed")
_NOT_INSTALLED = "source"
"""Version of a checkout that is not installed."""
_DRIVER_PROGRAMS = ("sbatch --version", "squeue --version", "scontrol ping")


@dataclass(frozen=True)
class Aim:
    """Job kinds that share a probe, as their jobs have the same options, interpreter and environment."""

    stages: tuple[str, ...]
    given: ResourcesConfig
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Models and data that each of the job kinds reads."""
    folder: str = ""
    """Folder that all of them must see and write into: the run's, or the one where that is to be made."""

    @property
    def name(self) -> str:
        return "-".join(self.stages)

    def who_reads(self, path: str) -> tuple[str, ...]:
        """Return the job kinds that read a path."""
        return tuple(stage for stage in self.stages if path in self.paths.get(stage, ())) or self.stages


def ask_nodes(
    config: Config, seconds: float = PROBE_SECONDS, measures_delay: bool = False
) -> list[tuple[Aim, Answer]]:
    """Send a tiny job to every place that stages go to, and wait for the answers."""
    aims = aims_of(config)
    probes = [replace(probe_of(config, aim), measures_delay=measures_delay) for aim in aims]
    with on_cluster(config.slurm.cluster if config.slurm else ""):
        answers = run_probes(probes, folder_of(config), Path.cwd(), seconds, note)
    return [(aim, answers[aim.name]) for aim in aims]


def folder_of(config: Config) -> Path:
    """Return the run directory, or the nearest folder above it that exists: probes answer there."""
    return existing_folder(Path(config.run_dir).absolute())


def note(line: str) -> None:
    """Tell a person on standard error, where it is in nobody's way, what is being waited for."""
    print(line, file=sys.stderr, flush=True)


def probe_cluster(config: Config, with_probe: bool) -> Iterator[str]:
    """Look at compute nodes of a cluster that allows what is asked for. Yields lines for people. Raises
    ConfigError with every problem."""
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
    folder = str(folder_of(config))
    return [
        Aim(
            tuple(kinds),
            resources_of(given, kinds[0]),
            {k: tuple(paths_of(config, k, Path.cwd())) for k in kinds},
            folder,
        )
        for kinds in groups.values()
    ]


def options_of(given: ResourcesConfig) -> dict[str, str | int | bool]:
    options = sbatch_options(given, Escalation(), None)
    return {name: value for name, value in options.items() if name not in _LEFT_OUT}


def words_of(given: ResourcesConfig) -> tuple[str, ...]:
    """Return the interpreter's command in its container, as for tasks but for one rank."""
    return tuple(interpreter_words(given))


def probe_of(config: Config, aim: Aim) -> Probe:
    is_driver = DRIVER in aim.stages
    return Probe(
        name=aim.name,
        options=options_of(aim.given),
        command=words_of(aim.given),
        modules=_PACKAGES if is_driver else (*_PACKAGES, *_LIBRARIES),
        paths=tuple(dict.fromkeys(path for paths in aim.paths.values() for path in paths)),
        programs=_DRIVER_PROGRAMS if is_driver else (),
        setup=aim.given.setup or (),
        environment=aim.given.environment,
        enters_image=bool(aim.given.container),
    )


def judge(aim: Aim, answer: Answer) -> Iterator[ConfigIssue]:
    """Find in a probe's answer what would keep the jobs of its job kinds from working. Pure."""
    key = key_of(aim.stages[0])
    if isinstance(answer, ProbeTimeout):
        if not answer.is_late:
            yield _unanswered(aim, answer)
        return
    yield from _sight_problems(aim, answer)
    at = _place(aim, answer)
    if answer.missing_modules:
        each = (f"{name.removeprefix('?')} ({why})" for name, why in answer.missing_modules.items())
        yield ConfigIssue(f"{key}.python", aim.given.python, f"cannot be imported {at}: {', '.join(each)}")
    if answer.version and version() not in (answer.version, _NOT_INSTALLED):
        why = f"slurm-ppo {answer.version} is installed {at}, and {version()} here; install the same in both"
        yield ConfigIssue(f"{key}.python", aim.given.python, why)
    for command, why in answer.unreachable.items():
        program = command.split()[0]
        yield ConfigIssue(f"{key}.partition", _partition(aim), f"{program} cannot be used {at}: {why}")
    yield from _gpu_problems(aim, answer)


def _unanswered(aim: Aim, answer: ProbeTimeout) -> ConfigIssue:
    """Report a job that was refused, or ended without an answer. Images most often lack the interpreter."""
    if answer.failed_setup:
        why = f"{answer.failed_setup}; mend it, or let it fail with || true"
        return ConfigIssue(f"{key_of(aim.stages[0])}.setup", "; ".join(aim.given.setup or ()), why)
    if image_of(aim.given) and answer.has_spoken:
        return _of_image(aim, aim.stages, f"{answer.why}; does this image have {aim.given.python}?")
    return ConfigIssue(f"{key_of(aim.stages[0])}.partition", _partition(aim), answer.why)


def _sight_problems(aim: Aim, answer: ProbeResult) -> Iterator[ConfigIssue]:
    """Find what jobs do not see of the run directory, of models and of data."""
    key, image, at = f"{key_of(aim.stages[0])}.partition", image_of(aim.given), _place(aim, answer)
    if answer.place_error:
        why = f"cannot write into {aim.folder}, where the run is, {at} ({answer.place_error})"
        if image:
            yield _of_image(aim, aim.stages, f"{why}; {way_in(aim.given, aim.folder)}")
        else:
            yield ConfigIssue(key, _partition(aim), f"{why}; give a folder on a shared filesystem")
    for path in answer.missing_paths:
        if image and path not in (answer.missing_outside or ()):
            why = f"cannot see {path} {at}; {way_in(aim.given, path)}"
            yield _of_image(aim, aim.who_reads(path), why)
        else:
            why = f"{path} does not exist on node {answer.node}; use a shared filesystem"
            yield ConfigIssue(key, _partition(aim), why)


def _of_image(aim: Aim, job_kinds: tuple[str, ...], why: str) -> ConfigIssue:
    """Report what some job kinds lack in their image."""
    key = image_key(aim.given, key_of(job_kinds[0]))
    return ConfigIssue(key, image_of(aim.given), f"{', '.join(job_kinds)}: {why}")


def _gpu_problems(aim: Aim, answer: ProbeResult) -> Iterator[ConfigIssue]:
    key, wanted, at = key_of(aim.stages[0]), gpus_wanted(aim.given), _place(aim, answer)
    if answer.gpus is not None and answer.gpus != wanted:
        told = f"{answer.gpus} GPUs are visible {at}, {wanted} were asked for"
        yield ConfigIssue(f"{key}.gpus_per_node", aim.given.gpus_per_node, told)
    if answer.driver_error and wanted and image_of(aim.given):
        why = f"the GPUs' driver is not visible {at} ({answer.driver_error}); {way_to_gpus(aim.given)}"
        yield _of_image(aim, aim.stages, why)


def _place(aim: Aim, answer: ProbeResult) -> str:
    return f"{'in its image ' if image_of(aim.given) else ''}on node {answer.node}"


def _partition(aim: Aim) -> str:
    return ",".join(aim.given.partition) or "default"


def describe(aim: Aim, answer: Answer) -> str:
    """Return one line on a probe that found nothing wrong."""
    stages = ", ".join(aim.stages)
    if isinstance(answer, ProbeTimeout):
        return f"warning: {stages}: not probed, its job had to wait too long ({answer.why})"
    gpus = f"GPUs: {answer.gpus or 0}" if answer.gpus or not gpus_wanted(aim.given) else "GPUs not visible"
    return f"{stages}: ok on node {answer.node}, Python {answer.python}, {gpus}"
