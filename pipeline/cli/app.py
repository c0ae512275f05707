"""The command line. Thin: every command composes, loads or asks, and prints.

Exit codes: 0 complete, 1 failed, 2 usage or configuration, 3 incomplete.
"""

import sys
from typing import Annotated

import typer

from pipeline.cli import checks, runs, views
from pipeline.cli import dashboard as dashboard_cli
from pipeline.cli import devcluster as devcluster_cli
from pipeline.cli.arguments import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, typed_words
from pipeline.cli.completion import install as completion_cli
from slurm.errors import ServiceError, UnfinishedError, UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="PPO post-training of language models as batch jobs. "
    "Exit codes: 0 complete, 1 failed, 2 usage or configuration, 3 incomplete.",
)

app.add_typer(devcluster_cli.app, name="devcluster")
app.add_typer(dashboard_cli.app, name="dashboard")
app.add_typer(completion_cli.app, name="completion")

for command in (
    *(runs.quickstart, runs.run, runs.submit, runs.resume, runs.cancel),
    *(views.status, views.watch, views.logs),
    *(checks.plan, checks.config, checks.validate, checks.try_),
    *(checks.doctor, checks.rehearse, checks.notify),
    *(views.samples, views.report, views.sync, views.export),
    *(runs.fork, runs.sweep, runs.ls, runs.clean),
):
    app.command(name=command.__name__.rstrip("_"))(command)
app.command(hidden=True)(runs.advance)


def _print_version(wanted: bool) -> None:
    if wanted:
        from pipeline.run.identity import version

        typer.echo(f"slurm-ppo {version()}")
        raise typer.Exit


@app.callback()
def slurm_ppo(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Run the command line: errors of the user's are one readable message and exit code 2."""
    from pipeline.cli.errors import is_passing, refusal, say_error, system_error

    try:
        app(args=typed_words(sys.argv[1:]))
    except UserError as error:
        say_error(refusal(error, next(iter(sys.argv[1:]), "")))
        sys.exit(EXIT_USAGE)
    except UnfinishedError as error:
        say_error(str(error))
        sys.exit(EXIT_FAILED)
    except ServiceError as error:
        say_error(f"{error}; nothing is lost, ask again later")
        sys.exit(EXIT_FAILED)
    except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
        sys.stderr.close()
        sys.exit(EXIT_FAILED)
    except OSError as error:
        say_error(system_error(error))
        sys.exit(EXIT_FAILED if is_passing(error) else EXIT_USAGE)
    except SystemExit as error:
        if error.code == EXIT_INTERRUPTED:  # Typer has caught it
            raise KeyboardInterrupt from None
        raise
