"""``slurm-ppo completion``: have the Tab key complete commands, runs and settings.

A shell's script is put where the shell finds it: once, without touching what is there.
"""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.completion.answer import SHELLS
from slurm.errors import UserError

MARK = "# completion of slurm-ppo"
app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Tab completion of commands, options, runs, settings and their values in bash, zsh and fish.",
)

Shell = Annotated[
    str | None, typer.Argument(metavar="[SHELL]", help="bash, zsh or fish. Default: that of $SHELL.")
]


def shell_of(given: str | None) -> str:
    """Return the shell that is meant: the given one, or the one that the user logs in with.

    Raises:
        UserError: there is no script for it.
    """
    found = given or Path(os.environ.get("SHELL", "")).name
    if found not in SHELLS:
        what = f"there is no completion for {found!r}" if found else "$SHELL does not say which shell you use"
        raise UserError(f"{what}; give one of {', '.join(SHELLS)}")
    return found


def script(shell: str) -> str:
    """Return a shell's script."""
    return (Path(__file__).parent / "scripts" / f"completion.{shell}").read_text(encoding="utf-8")


def install(shell: str) -> str:
    """Write the script into the user's folder, and have bash and zsh read it. Returns what was done."""
    from pipeline.run.durable import replace_durably

    place = place_of(shell)
    place.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(place, script(shell))
    lines = [f"wrote {place}"]
    if startup := startup_of(shell):
        line = f"[ -r {shlex.quote(str(place))} ] && . {shlex.quote(str(place))}  {MARK}"
        is_new = add_line(startup, line)
        lines.append(f"{startup} {'reads it now' if is_new else 'reads it already'}")
    return "\n".join([*lines, f"it works in every {shell} that you start from now on"])


def place_of(shell: str) -> Path:
    """Return the file for a shell's script."""
    if shell == "fish":
        return _folder("XDG_CONFIG_HOME", ".config") / "fish/completions/slurm-ppo.fish"
    return _folder("XDG_DATA_HOME", ".local/share") / f"slurm-ppo/completion.{shell}"


def startup_of(shell: str) -> Path | None:
    """Return the file that a shell reads when it starts; None of fish, which looks for scripts itself."""
    if shell == "fish":
        return None
    return Path.home() / ".bashrc" if shell == "bash" else _folder("ZDOTDIR", "") / ".zshrc"


def add_line(file: Path, line: str) -> bool:
    """Add a line at the end of a file that may be there, unless it has it. Returns whether it was added."""
    text = file.read_text(errors="surrogateescape") if file.exists() else ""
    if line in text.splitlines():
        return False
    with file.open("a") as startup:
        startup.write(f"\n{line}\n" if text and not text.endswith("\n") else f"{line}\n")
    return True


def _folder(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default)


@app.command(name="install")
def install_command(shell: Shell = None) -> None:
    """Install the completion for a shell, for you alone; again after an update of slurm-ppo does no harm."""
    typer.echo(install(shell_of(shell)))


@app.command()
def show(shell: Shell = None) -> None:
    """Print a shell's script, to put it elsewhere."""
    typer.echo(script(shell_of(shell)), nl=False)
