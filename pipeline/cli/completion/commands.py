"""``slurm-ppo completion``: have the Tab key complete commands, runs and settings."""

from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="The Tab key: commands, options, runs, settings and their values, in bash, zsh and fish.",
)

Shell = Annotated[
    str | None, typer.Argument(metavar="[SHELL]", help="bash, zsh or fish. Default: that of $SHELL.")
]


@app.command()
def install(shell: Shell = None) -> None:
    """Install the completion for a shell, for you alone; again after an update of slurm-ppo does no harm."""
    from pipeline.cli.completion.install import install as put_in_place
    from pipeline.cli.completion.install import shell_of

    typer.echo(put_in_place(shell_of(shell)))


@app.command()
def show(shell: Shell = None) -> None:
    """Print a shell's script, to put it elsewhere."""
    from pipeline.cli.completion.install import script, shell_of

    typer.echo(script(shell_of(shell)), nl=False)
