"""Commands that carry out runs: quickstart, run, submit, resume, cancel, advance, fork; of many: sweep, ls,
clean. Imports next to nothing by itself."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.arguments import (
    Changes,
    ConfigDir,
    Overrides,
    RunDir,
    Source,
    config_in_part,
    config_of,
    is_sweep,
    load,
    run_and_settings,
    run_to_come,
)

if TYPE_CHECKING:
    from pipeline.run.directory import Run


def run(overrides: Overrides = None, config_dir: ConfigDir = None) -> None:
    """Start a run and carry it to its end: on this machine, or on Slurm while you watch."""
    from pipeline.cli.run import start

    raise typer.Exit(start(*config_in_part(overrides, config_dir), watch=True))


def quickstart(overrides: Overrides = None) -> None:
    """Train a tiny policy by a tiny reward model, both made here, and judge whether it has learned.

    Takes some minutes on two CPU cores.
    """
    from pipeline.cli.quickstart import quickstart as carry_out

    raise typer.Exit(carry_out(overrides or []))


def submit(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch scripts; submit nothing.")
    ] = False,
) -> None:
    """Submit a run to Slurm and return: the run continues by itself.

    Takes overrides, or a run directory and then settings of it to change.
    """
    from pipeline.cli.run import resume_run, start

    existing, settings = run_and_settings(overrides)
    if dry_run:
        typer.echo(_scripts(existing, settings, config_dir))
        return
    if existing:
        done = resume_run(existing, watch=False, settings=settings, config_dir=config_dir)
        raise typer.Exit(done)
    raise typer.Exit(start(*config_in_part(overrides, config_dir), watch=False))


def _scripts(existing: "Run | None", settings: list[str], config_dir: Path | None) -> str:
    """Return the batch scripts that would be submitted, of a run with settings that change."""
    from pipeline.cli.settings import check_change
    from pipeline.executors.slurm.dry_run import scripts

    if existing is None:
        return scripts(run_to_come(config_of(settings, config_dir)))
    config = check_change(existing, settings, config_dir) if settings else existing.config
    return scripts(replace(existing, config=config))


def resume(
    run_dir: RunDir,
    overrides: Changes = None,
    config_dir: ConfigDir = None,
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
            help="Take over a run that another user or cluster has submitted; jobs of the former owner do no "
            "more work for it.",
        ),
    ] = False,
) -> None:
    """Continue a run where it stopped, or from an earlier stage; with settings that change from now on."""
    from pipeline.cli.run import resume_run

    done = resume_run(load(run_dir), True, from_, take_over, overrides or [], config_dir)
    raise typer.Exit(done)


def cancel(run_dir: RunDir) -> None:
    """Cancel the Slurm jobs of a run, or of all runs of a sweep, and no others.

    What was committed is kept. If the run directory is gone, give the run's id, which squeue shows in the
    names of its jobs.
    """
    if is_sweep(run_dir):
        from pipeline.cli.sweep import cancel_sweep

        raise typer.Exit(cancel_sweep(run_dir.absolute()))
    from pipeline.cli.lost import cancel_whatever_is_left

    typer.echo(cancel_whatever_is_left(run_dir))


def advance(
    run_dir: RunDir,
    asked: Annotated[
        bool, typer.Option("--asked", help="As a child of a worker: whenever workers request it.")
    ] = False,
) -> None:
    """The work of driver jobs: one pass, which submits what is due and retries what failed."""
    from pipeline.cli.queue import asked_passes, driver_job

    raise typer.Exit((asked_passes if asked else driver_job)(run_dir))


def fork(
    source: Source,
    new_run: Annotated[Path, typer.Argument(metavar="NEW_RUN", help="Directory of the new run.")],
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
) -> None:
    """Make a new run that continues from a policy of another run, with its own settings."""
    from pipeline.cli.run import fork_run
    from pipeline.cli.sweep_views import of_one_run

    typer.echo(fork_run(of_one_run(source, is_best_wanted=False), new_run, overrides or [], config_dir))


def sweep(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Overrides, some with several values: update.learning_rate=1e-6,3e-6 'seed=range(0,3)'. "
            "Or the folder of a sweep, to continue it."
        ),
    ] = None,
    config_dir: ConfigDir = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Runs per setting, with seeds counted from seed= on.")
    ] = None,
    at_once: Annotated[
        int | None, typer.Option("--at-once", min=1, help="Runs at once on this machine. Default: 1.")
    ] = None,
    point: Annotated[
        str | None,
        typer.Option(
            "--point", metavar="NAME", help="With a sweep's folder: only this run, on this machine."
        ),
    ] = None,
    drop: Annotated[
        str | None,
        typer.Option("--drop", metavar="NAME", help="With a sweep's folder: remove this run from the sweep."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs; start nothing.")] = False,
) -> None:
    """Start a run for each combination of values: in turn on this machine, or all at once in Slurm's queue.

    The same command again, or one with the sweep's folder alone, continues it; with more values it adds runs.
    Exit code 0: all complete (on Slurm: submitted), 1: some failed, 3: interrupted, or some run elsewhere.
    """
    from pipeline.cli.sweep import Asked, carry_out, drop_point, list_points

    asked = Asked(overrides or [], config_dir, seeds, at_once)
    if dry_run:
        typer.echo(list_points(asked))
    elif drop is not None:
        typer.echo(drop_point(asked, drop))
    else:
        raise typer.Exit(carry_out(asked, point))


def ls(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Folder with runs, or of a sweep. Default: runs, else this one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with stable keys.")] = False,
) -> None:
    """List runs: state, iteration, reward, GPU hours, age, size."""
    from pipeline.cli.listing import list_runs

    typer.echo(list_runs(folder, as_json))


def clean(
    folder: Annotated[Path, typer.Argument(metavar="RUN|DIR", help="A run, or a folder with runs.")],
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="KIND", help="superseded, states, leftovers, caches or logs; repeatable."
        ),
    ] = None,
) -> None:
    """Remove what resume does not need: superseded folders, old states, leftovers, caches, logs. Asks."""
    from pipeline.cli.clean import clean_runs

    raise typer.Exit(clean_runs(folder, yes, only or []))
