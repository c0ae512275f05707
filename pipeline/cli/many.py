"""Commands about many runs: sweep, ls, clean. Imports next to nothing by itself."""

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.options import ConfigDir


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
        int | None, typer.Option("--seeds", min=1, help="Runs of each setting, with seeds from seed= on.")
    ] = None,
    at_once: Annotated[
        int | None, typer.Option("--at-once", min=1, help="Runs at once on this machine. Default: 1.")
    ] = None,
    point: Annotated[
        str | None, typer.Option("--point", metavar="NAME", help="Of a sweep's folder: this run only, here.")
    ] = None,
    drop: Annotated[
        str | None,
        typer.Option("--drop", metavar="NAME", help="Of a sweep's folder: leave this run out from now on."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs there would be; start nothing.")
    ] = False,
) -> None:
    """Start a run for every combination of values: one after the other here, all through Slurm's queue there.

    The same command again, or with the sweep's folder alone, goes on where it stopped; with further values it
    adds runs. Exit code 0 all complete (on Slurm: submitted), 1 some failed, 3 interrupted, or
    some are at work elsewhere.
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
        typer.Argument(metavar="DIR", help="Folder with runs, or one of a sweep. Default: runs, else here."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with stable keys.")] = False,
) -> None:
    """List runs: state, iteration, reward, GPU hours, age, size. Reads little of each."""
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
    """Remove what no resume needs: superseded folders, old states, leftovers, caches, logs. Asks first."""
    from pipeline.cli.clean import clean_runs

    raise typer.Exit(clean_runs(folder, yes, only or []))
