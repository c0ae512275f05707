"""Arguments and options that several commands take, and exit codes."""

from pathlib import Path
from typing import Annotated

import typer

EXIT_FAILED, EXIT_USAGE, EXIT_INCOMPLETE, EXIT_INTERRUPTED = 1, 2, 3, 130

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Hydra overrides, e.g. experiment=quickstart seed=3 update.learning_rate=1e-5"),
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
