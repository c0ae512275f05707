"""Commands that carry out runs: run, submit, resume, cancel, advance, fork."""

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.arguments import config_in_part, config_of, existing_run, is_sweep, load, run_to_come
from pipeline.cli.options import ConfigDir, Overrides, RunDir, Source


def run(overrides: Overrides = None, config_dir: ConfigDir = None) -> None:
    """Start a run and carry it to its end: on this machine, or on Slurm while you watch."""
    from pipeline.cli.run import start

    raise typer.Exit(start(*config_in_part(overrides, config_dir), watch=True))


def submit(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch scripts; submit nothing.")
    ] = False,
) -> None:
    """Start a run on Slurm and return at once: it goes on by itself. Takes overrides, or a run directory."""
    from pipeline.cli.run import resume_run, start

    existing = existing_run(overrides)
    if dry_run:
        from pipeline.preflight.dry_run import scripts

        typer.echo(scripts(existing or run_to_come(config_of(overrides, config_dir))))
        return
    if existing:
        raise typer.Exit(resume_run(existing, watch=False))
    raise typer.Exit(start(*config_in_part(overrides, config_dir), watch=False))


def resume(
    run_dir: RunDir,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STAGE[@ITERATION]",
            help="Go back to a stage first; what it supersedes is moved aside, never deleted.",
        ),
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Of a run that another user or cluster has submitted: make it yours first. Jobs of its "
            "owner's do nothing more.",
        ),
    ] = False,
) -> None:
    """Continue a run where it stopped, or from an earlier stage."""
    from pipeline.cli.run import resume_run

    raise typer.Exit(resume_run(load(run_dir), watch=True, back_to=from_, takes_over=take_over))


def cancel(run_dir: RunDir) -> None:
    """Cancel the run's jobs on Slurm, and only these; of a sweep those of all its runs.

    Nothing that was committed is lost. Of a run whose directory is gone, its id does: squeue shows it in the
    jobs' names.
    """
    if is_sweep(run_dir):
        from pipeline.cli.sweep import cancel_sweep

        raise typer.Exit(cancel_sweep(run_dir.absolute()))
    from pipeline.cli.lost import cancel_whatever_is_left

    typer.echo(cancel_whatever_is_left(run_dir))


def advance(
    run_dir: RunDir,
    asked: Annotated[
        bool, typer.Option("--asked", help="As a worker's child: whenever workers ask for it.")
    ] = False,
) -> None:
    """What driver jobs do: look once, submit what is due, repair what failed."""
    from pipeline.cli.queue import asked_passes, driver_job

    raise typer.Exit((asked_passes if asked else driver_job)(run_dir))


def fork(
    source: Source,
    new_run: Annotated[Path, typer.Argument(metavar="NEW_RUN", help="Directory of the new run.")],
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
) -> None:
    """Make a new run that goes on from a policy of another, with settings of its own."""
    from pipeline.cli.run import fork_run
    from pipeline.cli.sweep_views import of_one_run

    typer.echo(fork_run(of_one_run(source, is_best_wanted=False), new_run, overrides or [], config_dir))
