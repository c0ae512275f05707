"""Arguments, options and exit codes of several commands, and the runs and configurations that words name.

Imports next to nothing by itself.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pipeline.config.findings import Findings
    from pipeline.config.schema import Config
    from pipeline.run.directory import Run


EXIT_FAILED, EXIT_USAGE, EXIT_INCOMPLETE, EXIT_INTERRUPTED = 1, 2, 3, 130

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Hydra overrides, e.g. experiment=quickstart seed=3 update.learning_rate=1e-5"),
]
Changes = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, e.g. scheduler.update.time=8:00:00")
]
ConfigDir = Annotated[
    Path | None, typer.Option("--config-dir", help="Folder with config groups of your own, searched first.")
]
Source = Annotated[
    str, typer.Argument(metavar="RUN[@ITERATION]", help="Run directory and iteration; @best for the best.")
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")]


def exit_of(state: str) -> typer.Exit:
    """Return how a command ends that has shown a run in a state."""
    return typer.Exit({"complete": 0, "failed": EXIT_FAILED}.get(state, EXIT_INCOMPLETE))


def typed_words(words: list[str]) -> list[str]:
    """Return the words of a command line, with home directories that no shell has put in them."""
    if not any("~" in word for word in words):
        return words
    from pipeline.config.home import arguments_with_home

    return arguments_with_home(words)


def planned_run(overrides: list[str] | None, config_dir: Path | None) -> "Run":
    """Return the run of a directory, or one that the overrides would make. What is auto in them is of a run
    that is there what was decided when it began."""
    from pipeline.config.hardware import as_decided
    from pipeline.run.directory import is_run
    from pipeline.run.identity import RunError

    if existing := existing_run(overrides):
        return existing
    composed, found = config_in_part(overrides, config_dir)
    root = Path(composed.run_dir)
    if not is_run(root):
        _refuse_or_say(found)
        return run_to_come(composed)
    found.refuse()
    run = load(root)
    asked = as_decided(composed, found.auto, run.config)
    if asked not in (run.config, run.with_settings(0).config):
        raise RunError(
            f"{root} holds a run with other settings; to see what it has left to do: slurm-ppo plan {root}"
        )
    return run


def run_to_come(config: "Config") -> "Run":
    """Return the run that a configuration would make. Raises RunError where it may not lie."""
    from pipeline.run.directory import check_is_outside_runs, imagined_run

    check_is_outside_runs(Path(config.run_dir))
    return imagined_run(config)


def existing_run(overrides: list[str] | None) -> "Run | None":
    """Return the run, where the only argument is a run directory."""
    from pipeline.run.directory import is_run

    if overrides and len(overrides) == 1 and is_run(root := Path(overrides[0])):
        return load(root)
    return None


def run_and_settings(words: list[str] | None) -> "tuple[Run | None, list[str]]":
    """Return the run whose directory is the first word, None where it is none, and the other words."""
    from pipeline.run.directory import is_run

    given = words or []
    if given and "=" not in given[0] and is_run(root := Path(given[0])):
        return load(root), given[1:]
    return None, given


def load(root: Path) -> "Run":
    from pipeline.run.directory import load_run

    return load_run(root)


def is_sweep(root: Path) -> bool:
    """Whether a directory holds a sweep, and no run."""
    from pipeline.sweep.manifest import is_sweep as holds_manifest

    return holds_manifest(root)


def config_of(overrides: list[str] | None, config_dir: Path | None) -> "Config":
    """Return the configuration that words set, and say on stderr what was decided of settings that are auto.
    Raises ConfigError with every problem."""
    config, found = config_in_part(overrides, config_dir)
    _refuse_or_say(found)
    return config


def _refuse_or_say(found: "Findings") -> None:
    found.refuse()
    if found.decided:
        typer.echo(found.decided, err=True)


def config_in_part(overrides: list[str] | None, config_dir: Path | None) -> "tuple[Config, Findings]":
    """Return what can be made of the configuration that words set, for further checks, and what is wrong with
    them. Raises ConfigError where nothing can be made."""
    from pipeline.config.findings import Findings
    from pipeline.config.resolve import configure_what_can_be
    from pipeline.run.directory import no_setting

    for word in overrides or []:
        if "=" not in word and not word.startswith("~"):
            raise no_setting(word)
    found = Findings()
    config = configure_what_can_be(overrides or [], config_dir, found)
    if config is None:
        found.refuse()
    assert config is not None
    return config, found
