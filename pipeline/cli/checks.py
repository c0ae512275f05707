"""Commands that show what a run would be, and try what it needs: plan, config, validate, try, doctor,
rehearse, notify."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.arguments import (
    EXIT_FAILED,
    EXIT_USAGE,
    ConfigDir,
    Overrides,
    config_in_part,
    config_of,
    existing_run,
    planned_run,
)
from slurm.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.config.findings import Findings
    from pipeline.config.schema import Config
    from pipeline.run.directory import Run


GpuMemory = Annotated[
    float | None,
    typer.Option(
        min=1, help="GiB per GPU. Default: from the types of the cluster's GPUs, or the driver here."
    ),
]


def plan(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    gpu_memory: GpuMemory = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Every task and why; on Slurm also the batch scripts that are due.")
    ] = False,
) -> None:
    """Show what would run and why, what is due now, and what a new run will take; run nothing.

    Takes overrides, or one run directory.
    """
    from pipeline.run.directory import is_run

    run = planned_run(overrides, config_dir)
    for line in _plan_lines(run, all_):
        typer.echo(line)
    if not all_ and not is_run(run.paths.root):
        from pipeline.checks.suites import forecast_lines

        typer.echo()
        for line in forecast_lines(run.config, gpu_memory):
            typer.echo(line)
        typer.echo()
    typer.echo("This was a plan: nothing was run.")


def _plan_lines(run: "Run", every: bool) -> "Iterator[str]":
    from pipeline.status.plan import describe_plan, every_task

    if not every:
        return describe_plan(run)
    if run.config.slurm:
        from pipeline.executors.slurm.dry_run import scripts

        typer.echo(f"{scripts(run)}\n")
    return every_task(run)


def config(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    history: Annotated[
        bool,
        typer.Option("--history", help="Of a run: what was changed of its settings, and when."),
    ] = False,
) -> None:
    """Print the resolved configuration, every key, as YAML: of overrides, or of a run directory."""
    from pipeline.config.compose import to_yaml
    from pipeline.run.changes import history as lines_of

    run = existing_run(overrides)
    if history and run is None:
        raise UserError("--history: give a run directory")
    if run and history:
        typer.echo("\n".join(lines_of(run.changes)) or "its settings are as it began")
    else:
        typer.echo(to_yaml(run.config if run else config_of(overrides, config_dir)), nl=False)


def validate(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    probe: Annotated[
        bool,
        typer.Option(help="On Slurm: check compute nodes with a tiny job each, two minutes at most."),
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object with the keys of doctor --json, problems first.")
    ] = False,
    gpu_memory: GpuMemory = None,
) -> None:
    """Check configuration, models, prompts, plug-ins and the cluster; start nothing."""
    from pipeline.checks import suites

    def make() -> "tuple[Config, Findings]":
        return config_in_part(overrides, config_dir)

    if not as_json:
        for line in suites.validate(make, probe, gpu_memory):
            typer.echo(line)
        return
    found = suites.validate_as_json(make, probe, gpu_memory)
    typer.echo(json.dumps(found, indent=1))
    raise typer.Exit(EXIT_USAGE if found["problems"] else 0)


def try_(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    prompts: Annotated[
        int | None,
        typer.Option(
            "--prompts", min=1, help="Number of prompts. Default: enough for 32 responses, at least 4."
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.1, help="On Slurm: cancel the jobs after this many minutes.")
    ] = 30.0,
    full: Annotated[bool, typer.Option("--full", help="Show every response, with its whole text.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the small run's directory and logs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with stable keys.")] = False,
    candidates: Annotated[
        bool,
        typer.Option("--time-candidates", help="Also time settings of the update here, and print the best."),
    ] = False,
) -> None:
    """Sample and train on a few prompts with the run's own tasks: show responses, and what a run would take.

    Takes the overrides of run. Leaves no files. Exit code 1 if there is a problem.
    """
    from pipeline.cli.try_run import TryOptions, try_run

    options = TryOptions(prompts, minutes, keep, full, as_json, candidates)
    raise typer.Exit(try_run(*config_in_part(overrides, config_dir), options))


def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN|OVERRIDES", help="A run directory, or settings. Default: this machine."),
    ] = None,
    config_dir: ConfigDir = None,
    probe: Annotated[
        bool, typer.Option(help="On Slurm: check compute nodes with a tiny job each, two minutes at most.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with stable keys.")] = False,
    candidates: Annotated[
        bool,
        typer.Option(
            "--time-candidates",
            help="Only time an optimizer step here: precision, ZeRO, micro-batch, attention; print the best.",
        ),
    ] = False,
) -> None:
    """Check what a run needs, by trying it: packages, disk, filesystem, Slurm, W&B, the run itself.

    Leaves no files. Exit code 1 if there is a problem; warnings do not count.
    """
    if candidates:
        return _time_candidates(overrides, config_dir)
    from pipeline.checks.suites import doctor as examine
    from pipeline.checks.suites import patient_of
    from pipeline.run.directory import imagined_run

    words = overrides or []
    is_folder = len(words) == 1 and "=" not in Path(words[0]).name
    has_settings = (bool(words) or config_dir is not None) and not is_folder
    run = imagined_run(config_of(words, config_dir)) if has_settings else None
    patient = patient_of(Path(words[0]) if is_folder else None, run)
    raise typer.Exit(0 if examine(patient, probe, as_json) else EXIT_FAILED)


def _time_candidates(overrides: list[str] | None, config_dir: Path | None) -> None:
    from pipeline.checks.candidates import timed_lines

    run = existing_run(overrides)
    for line in timed_lines(run.config if run else config_of(overrides, config_dir)):
        typer.echo(line)


def rehearse(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN|OVERRIDES", help="A run directory, or settings. Default: this machine."),
    ] = None,
    config_dir: ConfigDir = None,
    short: Annotated[
        bool,
        typer.Option(
            "--short", help="Only processes, storage, one engine, ZeRO 0 and 3: minutes on two cores."
        ),
    ] = False,
    only: Annotated[
        str, typer.Option(metavar="CHECKS", help="Names of checks, separated by commas. Default: all.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object with the keys of doctor --json, failures first.")
    ] = False,
) -> None:
    """Run engines, ranks and storage on tiny models, on this machine or on each stage's partition.

    Leaves no files. Exit code 1 if a check failed; what cannot be shown here does not count.
    """
    from pipeline.checks.rehearsal_places import RehearsalOptions
    from pipeline.checks.suites import rehearsed

    run = existing_run(overrides)
    has_settings = bool(overrides) or config_dir is not None
    given = run.config if run else config_of(overrides or [], config_dir) if has_settings else None
    names = tuple(name.strip() for name in only.split(",") if name.strip())
    raise typer.Exit(0 if rehearsed(RehearsalOptions(given, names, short), as_json) else EXIT_FAILED)


def notify(overrides: Overrides = None, config_dir: ConfigDir = None) -> None:
    """Send a test event to notify.command, and say whether it arrived.

    Takes overrides, or one run directory. Exit code 1 if it did not arrive.
    """
    from pipeline.notify.events import send_trial
    from pipeline.run.directory import imagined_run

    run = existing_run(overrides)
    if run is None:
        config, found = config_in_part(overrides, config_dir)
        found.refuse()
        run = imagined_run(config)
    trouble = send_trial(run)
    typer.echo(f"notify.command: {trouble or 'a test event was sent'}")
    raise typer.Exit(EXIT_FAILED if trouble else 0)
