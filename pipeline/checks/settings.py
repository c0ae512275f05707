"""Checks of everything the user gave, for ``validate``. Starts no run."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from pipeline.checks.components import describe_components
from pipeline.checks.disk import check_disk
from pipeline.checks.models import try_models
from pipeline.checks.prompts import validate_rows
from pipeline.config.findings import Findings
from pipeline.config.issue import ConfigIssue
from pipeline.config.model_rules import model_notes
from pipeline.config.reward import ENVIRONMENT_RULE, RuleConfig
from pipeline.config.scheduler import ResourcesConfig
from pipeline.config.schema import Config
from pipeline.config.staleness_rules import staleness_warnings
from pipeline.executors.allocation import describe_allocation
from pipeline.executors.local_limits import describe_gpus
from pipeline.forecast.lengths import PromptLengths
from pipeline.notify.events import is_secret_name
from pipeline.plugins.load import make_importable
from pipeline.plugins.trial import check_engines, check_scheduler
from pipeline.run.directory import check_can_be_made, check_is_free
from pipeline.run.paths import RunPaths
from pipeline.tracking.destination import package_problem, switched_on


def validate_inputs(
    config: Config,
    found: Findings,
    folder: Path | None = None,
    start: int = 0,
    with_weights: bool = False,
    lengths: list[PromptLengths] | None = None,
) -> Iterator[str]:
    """Check everything the user gave. Yields lines for people, and adds what cannot be used to ``found``: no
    problem hides another.

    Args:
        folder: folder that rules are imported from. Default: the current one.
        start: number of iterations that a fork has from its parent.
        with_weights: try the models too, which takes seconds; else the run's first task does.
        lengths: gets the lengths of the prompts of each file that could be tokenised.
    """
    with found.collecting("run_dir", is_last=True):
        check_is_free(RunPaths(Path(config.run_dir)))
        check_can_be_made(Path(config.run_dir))
    make_importable(str(folder or Path.cwd()))
    yield from [found.decided] * bool(found.decided)
    yield from _collected(
        config,
        found,
        {
            "GPUs": describe_gpus,
            "the allocation": describe_allocation,
            "sizes and number formats": describe_run,
            "environments": describe_environments,
            "disk space": functools.partial(check_disk, start=start),
            "config.json of the models": model_notes,
        },
    )
    samples = yield from validate_rows(config, found, [] if lengths is None else lengths)
    with found.collecting("the scheduler"):
        check_scheduler(config)
    found.add(package_problems(config))
    yield from _collected(config, found, {"engines": check_engines})
    yield from describe_components(config, samples, found)
    yield from warnings_of(config)
    if with_weights and not found:
        yield from _collected(config, found, {"weights of the models": try_models})


def package_problems(config: Config) -> Iterator[ConfigIssue]:
    """Yield trackers that are asked for and whose package is missing. W&B's is always installed."""
    for to in switched_on(config.tracking):
        if why := package_problem(to):
            yield ConfigIssue(f"tracking.{to}.enabled", "true", why)


def _collected(
    config: Config, found: Findings, checks: Mapping[str, Callable[[Config], Iterable[str]]]
) -> Iterator[str]:
    """Yield the lines of checks, and add the problem that one raises to ``found``.

    Args:
        checks: by what each looks at, for people.
    """
    for what, check in checks.items():
        with found.collecting(what):
            yield from check(config)


def warnings_of(config: Config) -> Iterator[str]:
    """Warn of settings that are legal and may not be meant."""
    if config.model.trust_remote_code:
        yield "warning: model.trust_remote_code is on, Python code in the model directories will be run"
    yield from staleness_warnings(config)
    yield from environment_warnings(config)


def describe_run(config: Config) -> Iterator[str]:
    """Yield the sizes and number formats of a run."""
    yield f"configuration: {config.iterations} iterations of {config.responses_per_iteration} responses"
    yield f"policy: {config.model.policy}, context {config.model.context_length} tokens"
    formats = (config.update.precision, config.rollout_precision, config.reward_precision)
    yield "number formats: update {}, rollout {}, reward and reference {}".format(*formats)


def describe_environments(config: Config) -> Iterator[str]:
    """Yield a line for each environment that makes prompts, and a warning where none of them scores."""
    made, components = config.data.environment, config.reward.components.values()
    if made is None:
        return
    for name, share in made.shares.items():
        held_out = f" and {made.heldout_shares[name]:,} held-out ones" if config.evaluate.every else ""
        yield f"environment {name}: {made.components[name].source}, is asked for {share:,} tasks{held_out}"
    rules = [one.function for one in components if isinstance(one, RuleConfig)]
    if ENVIRONMENT_RULE not in rules:
        yield (
            "warning: data.environment: no component of the reward scores by the environments; "
            f"choose reward=environment, or give a rule the function {ENVIRONMENT_RULE}"
        )


def environment_warnings(config: Config) -> Iterator[str]:
    """Warn of job variables that look like secrets: their values lie in config.yaml and batch scripts."""
    scheduler = config.slurm
    if scheduler is None:
        return
    stages = {name: stage for name, stage in vars(scheduler).items() if isinstance(stage, ResourcesConfig)}
    stages |= {f"pools.{name}": pool for name, pool in scheduler.pools.items()}
    given = {"scheduler": scheduler.environment}
    given |= {f"scheduler.{name}": stage.environment for name, stage in stages.items()}
    for key, variables in given.items():
        for name in filter(is_secret_name, variables):
            yield (
                f"warning: {key}.environment.{name}: its value is written to files of the run, which others "
                "may read; export it where you submit, or read it from a file by scheduler.setup"
            )
