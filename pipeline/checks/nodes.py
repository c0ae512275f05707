"""Probe jobs: whether jobs find what they need on compute nodes."""

import importlib.util
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.checks.disk import existing_folder
from pipeline.checks.files import SYNCHRONISE
from pipeline.checks.finding import Finding, ok, problem, warning
from pipeline.checks.sight import image_key, image_of, paths_of, way_in, way_to_gpus
from pipeline.config.issue import ConfigIssue
from pipeline.config.job_kinds import DRIVER
from pipeline.config.scheduler import SLURM_STAGES, ResourcesConfig, key_of, resources_of
from pipeline.config.schema import Config
from pipeline.decide.device_faults import diagnose
from pipeline.decide.escalating import Escalation
from pipeline.executors.slurm.resources import interpreter_words, sbatch_options
from pipeline.run.cards import capability_of, format_problems, formats_of
from pipeline.run.identity import version
from pipeline.run.lease import EXPIRY_SECONDS
from pipeline.run.tasks import Stage, Task
from slurm.commands import on_cluster
from slurm.probe import Answer, Exchange, Probe, ProbeResult, ProbeTimeout, run_probes

PROBE_SECONDS = 120.0
_LATE_SECONDS = 5.0
_TOO_LATE_SECONDS = 60.0
_MEND_NODE = "install there what is missing, bind it into the image, or use a shared filesystem"
_MEND_JOB = "see what the job said, and fix scheduler.setup, the image or the paths"
_LEFT_OUT = (
    *("time", "mem", "cpus-per-task", "nodes", "ntasks-per-node", "signal"),
    *("mail-type", "mail-user"),
)
"""sbatch options that probes leave out: resources they need not wait for, and mail."""
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
    formats: Mapping[str, str] = field(default_factory=dict)
    """Number formats and attention that they compute with, by key."""

    @property
    def name(self) -> str:
        return "-".join(self.stages)

    def who_reads(self, path: str) -> tuple[str, ...]:
        """Return the job kinds that read a path."""
        return tuple(stage for stage in self.stages if path in self.paths.get(stage, ())) or self.stages


def ask_nodes(config: Config, measures_delay: bool = False) -> list[tuple[Aim, Answer]]:
    """Send a tiny job to every place that stages go to, and wait for the answers."""
    aims = aims_of(config)
    probes = [replace(probe_of(config, aim), measures_delay=measures_delay) for aim in aims]
    with on_cluster(config.slurm.cluster if config.slurm else ""):
        answers = run_probes(probes, folder_of(config), Path.cwd(), PROBE_SECONDS, note)
    return [(aim, answers[aim.name]) for aim in aims]


def folder_of(config: Config) -> Path:
    """Return the run directory, or the nearest folder above it that exists: probes answer there."""
    return existing_folder(Path(config.run_dir).absolute())


def note(line: str) -> None:
    """Print on standard error what is being waited for."""
    print(line, file=sys.stderr, flush=True)


def check_nodes(config: Config | None, folder: Path, measures_delay: bool = False) -> Iterator[Finding]:
    """Send tiny jobs, one to each place that stages go to; or one to the default partition."""
    if config is not None:
        for aim, answer in ask_nodes(config, measures_delay):
            yield from judge_node(", ".join(aim.stages), aim, answer)
        return
    probe = Probe("default", {}, (sys.executable,), ("slurm", "pipeline"), measures_delay=measures_delay)
    answer = run_probes([probe], folder, Path.cwd(), PROBE_SECONDS, note)["default"]
    aim = Aim(("driver",), ResourcesConfig(python=sys.executable))
    yield from judge_node("the default partition", aim, answer)


def judge_node(name: str, aim: Aim, answer: Answer) -> Iterator[Finding]:
    """Judge the answer of a probe job. Pure."""
    title, issues = f"node for {name}", list(judge(aim, answer))
    is_silent = isinstance(answer, ProbeTimeout)
    advice = _MEND_JOB if is_silent else _MEND_NODE
    yield from (problem(title, str(issue), advice) for issue in issues)
    if isinstance(answer, ProbeTimeout):
        if answer.is_late:
            advice = "run the command again when the queue is shorter"
            yield warning(title, f"its job had to wait too long ({answer.why})", advice)
        return
    if not issues:
        facts = f"{answer.node}, Python {answer.python}, {_gpus_in_words(aim, answer)}"
        yield ok(title, f"{facts}; what the stage needs is there")
    if answer.exchange is not None:
        yield judge_exchange(f"files of {answer.node}", answer.exchange)


def _gpus_in_words(aim: Aim, answer: ProbeResult) -> str:
    if not answer.gpus and aim.given.num_gpus:
        return "GPUs not visible"
    kinds = " and ".join(sorted(set(answer.capabilities)))
    return f"GPUs: {answer.gpus or 0}" + (f" of compute capability {kinds}" if kinds else "")


def judge_exchange(title: str, seen: Exchange) -> Finding:
    """Judge how long files take between a node and this machine. Pure."""
    clock = f"its clock is {abs(seen.node_skew):.2f} s {'behind' if seen.node_skew > 0 else 'ahead of'} the "
    clock = f"; {clock}file server's" if abs(seen.node_skew) >= 0.1 else ""
    numbers = {"node_skew_seconds": seen.node_skew}
    if seen.round_trip is None:
        facts = f"what this machine wrote was not seen there in {_TOO_LATE_SECONDS:g} s{clock}"
        return problem(title, facts, "mount it without long caches (acdirmax), or choose another run_dir")
    numbers["round_trip_seconds"] = seen.round_trip
    here = f"{max(0.0, seen.seen_here):.2f} s to be seen here"
    there = f"{max(0.0, seen.round_trip - max(0.0, seen.seen_here)):.2f} s to be seen there"
    facts = f"{here}, {there}{clock}"
    if abs(seen.node_skew) > EXPIRY_SECONDS / 2:
        return problem(title, facts, SYNCHRONISE, **numbers)
    if seen.round_trip > _LATE_SECONDS:
        advice = "a run works, each stage waits for as long; shorter caches (acdirmax) would help"
        return warning(title, facts, advice, **numbers)
    return ok(title, facts, **numbers)


def aims_of(config: Config, left_out: Collection[str] = _LEFT_OUT) -> list[Aim]:
    """Group the job kinds by options but for those left out, interpreter, container, setup and environment.
    Pure."""
    given = config.slurm
    assert given
    groups: dict[object, list[str]] = {}
    for stage in job_kinds_used(config):
        resources = resources_of(given, stage)
        key = (
            tuple(options_of(resources, left_out).items()),
            words_of(resources),
            resources.setup,
            stage == DRIVER,
        )
        groups.setdefault((key, tuple(resources.environment.items())), []).append(stage)
    folder = str(folder_of(config))
    return [
        Aim(
            tuple(kinds),
            resources_of(given, kinds[0]),
            {k: tuple(paths_of(config, k, Path.cwd())) for k in kinds},
            folder,
            formats_of(config, *kinds),
        )
        for kinds in groups.values()
    ]


def options_of(given: ResourcesConfig, left_out: Collection[str] = _LEFT_OUT) -> dict[str, str | int | bool]:
    options = sbatch_options(given, Escalation(), None)
    return {name: value for name, value in options.items() if name not in left_out}


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
        trial=trial_source() if aim.given.num_gpus and not is_driver else "",
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
        why = f"{answer.failed_setup}; fix it, or let it fail with || true"
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
    key, wanted, at = key_of(aim.stages[0]), aim.given.num_gpus or 0, _place(aim, answer)
    if answer.gpus is not None and answer.gpus != wanted:
        message = f"{answer.gpus} GPUs are visible {at}, {wanted} were asked for"
        yield ConfigIssue(f"{key}.gpus_per_node", aim.given.gpus_per_node, message)
    if answer.driver_error and wanted and image_of(aim.given):
        why = f"the GPUs' driver is not visible {at} ({answer.driver_error}); {way_to_gpus(aim.given)}"
        yield _of_image(aim, aim.stages, why)
    if answer.trial_error and wanted:
        why = f"the GPUs do not compute {at}: {answer.trial_error}; {way_out(answer.trial_error)}"
        yield ConfigIssue(f"{key}.partition", _partition(aim), why)
    if wanted and answer.capabilities:
        yield from format_problems(aim.formats, min(map(capability_of, answer.capabilities)), at)


def _place(aim: Aim, answer: ProbeResult) -> str:
    return f"{'in its image ' if image_of(aim.given) else ''}on node {answer.node}"


def _partition(aim: Aim) -> str:
    return ",".join(aim.given.partition) or "default"


def job_kinds_used(config: Config) -> list[str]:
    """Return the job kinds that have jobs in a run of this configuration: stages, driver, ``score-POOL``."""
    unused: dict[str, bool] = {
        Stage.EVALUATE: not config.evaluate.every,
        Stage.BENCHMARK: not config.evaluate.command,
    }
    stages = [stage for stage in SLURM_STAGES if not unused.get(stage)]
    return [*stages, *(Task(1, Stage.SCORE, pool=pool).job_kind for pool in config.reward.pools)]


# GPUs that are there and do not compute: how that is found out on a node, and the way out.

_TRIAL = "stages.models.device_trial"
"""Module that imports torch: its text is run elsewhere."""
_WAY_OUT = (
    "look at nvidia-smi there: its driver must be new enough for torch's CUDA (docs/howto/gpus.md); "
    "scheduler.STAGE.exclude leaves a node out"
)


def trial_source() -> str:
    """Return the program that tries a process's GPUs."""
    found = importlib.util.find_spec(_TRIAL)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_text()


def way_out(problem: str) -> str:
    """Return what to do about what the driver says. Pure."""
    found = diagnose(problem)
    return found.row.change if found else _WAY_OUT
