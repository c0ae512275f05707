"""Commands that show what a run would be, and try what it needs: plan, config, validate, doctor, notify."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.arguments import config_in_part, config_of, existing_run, planned_run
from pipeline.cli.options import EXIT_FAILED, ConfigDir, Overrides

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.run.directory import Run


def plan(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Every task and why, on Slurm also the batch scripts that are due.")
    ] = False,
) -> None:
    """Say what would run and why, by stage, and what is due now; run nothing.

    Takes overrides, or one run directory.
    """
    for line in _plan_lines(planned_run(overrides, config_dir), all_):
        typer.echo(line)


def _plan_lines(run: "Run", every: bool) -> "Iterator[str]":
    from pipeline.status.plan import describe_plan, every_task

    if not every:
        return describe_plan(run)
    if run.config.slurm:
        from pipeline.preflight.dry_run import scripts

        typer.echo(f"{scripts(run)}\n")
    return every_task(run)


def config(overrides: Overrides = None, config_dir: ConfigDir = None) -> None:
    """Print the resolved configuration, every key, as YAML."""
    from pipeline.config.compose import to_yaml

    typer.echo(to_yaml(config_of(overrides, config_dir)), nl=False)


def validate(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    probe: Annotated[
        bool,
        typer.Option(help="On Slurm: look at compute nodes by a tiny job each, for two minutes at most."),
    ] = True,
) -> None:
    """Check configuration, models, prompts, plug-ins and the cluster; start nothing."""
    from pipeline.cli.run import check

    given, found = config_in_part(overrides, config_dir)
    check(given, found, say=typer.echo, with_weights=True)
    if given.slurm:
        from pipeline.preflight.probe import probe_cluster

        for line in probe_cluster(given, probe):
            typer.echo(line)


def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN|OVERRIDES", help="A run directory, or settings. Default: here."),
    ] = None,
    config_dir: ConfigDir = None,
    probe: Annotated[
        bool, typer.Option(help="On Slurm: look at compute nodes by a tiny job each, two minutes at most.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with stable keys.")] = False,
) -> None:
    """Check what a run needs, by trying it: packages, disk, filesystem, Slurm, W&B, the run itself.

    Leaves nothing behind. Exit code 1 if there is a problem; warnings do not count.
    """
    from pipeline.doctor.examine import doctor as examine
    from pipeline.doctor.examine import patient_of
    from pipeline.run.directory import imagined_run

    words = overrides or []
    is_folder = len(words) == 1 and "=" not in Path(words[0]).name
    run = None if is_folder or not words else imagined_run(config_of(words, config_dir))
    patient = patient_of(Path(words[0]) if is_folder else None, run)
    raise typer.Exit(0 if examine(patient, probe, as_json) else EXIT_FAILED)


def notify(overrides: Overrides = None, config_dir: ConfigDir = None) -> None:
    """Send a test event to notify.command and notify.webhook, and say whether it arrived.

    Takes overrides, or one run directory. Exit code 1 if it did not arrive everywhere.
    """
    from pipeline.notify.events import send_trial
    from pipeline.run.directory import imagined_run

    existing = existing_run(overrides)
    lines, has_arrived = send_trial(existing or imagined_run(config_of(overrides, config_dir)))
    typer.echo("\n".join(lines))
    raise typer.Exit(0 if has_arrived else EXIT_FAILED)
