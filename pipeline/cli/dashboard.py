"""``slurm-ppo dashboard``: the W&B workspace that a project's runs are looked at in. Thin."""

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Create the W&B workspace of a project: sections and panels for every metric.",
)

RunDir = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="Use this run's project, and keep it and its parent in view."),
]
Project = Annotated[str | None, typer.Option(help="Default: the run's, else WANDB_PROJECT, else slurm-ppo.")]
Entity = Annotated[
    str | None, typer.Option(help="User or team. Default: the run's, else WANDB_ENTITY, else your key's.")
]


@app.command()
def push(
    run_dir: RunDir = None,
    project: Project = None,
    entity: Entity = None,
    timeout: Annotated[
        int, typer.Option("--timeout", min=1, max=86_400, help="Seconds for each answer.")
    ] = 15,
) -> None:
    """Create or update the workspace, and print its address. Needs an API key.

    Panels and settings that users have added are kept.
    """
    from pipeline.run.directory import load_run
    from pipeline.tracking.push import push as carry
    from pipeline.tracking.push import target_of

    done = carry(target_of(load_run(run_dir) if run_dir else None, project, entity), timeout)
    typer.echo(done, err=True)
    typer.echo(done.url)


@app.command("print")
def print_spec(run_dir: RunDir = None, project: Project = None, entity: Entity = None) -> None:
    """Print the workspace as JSON. Needs neither a key nor a network."""
    from pipeline.run.directory import load_run
    from pipeline.tracking.push import target_of

    target = target_of(load_run(run_dir) if run_dir else None, project, entity)
    typer.echo(json.dumps(target.to_json(), indent=1))
