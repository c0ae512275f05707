"""docs/reference/commands.md: every command, from the command line's own description."""

from collections.abc import Iterator
from typing import Any

import typer.main

from docs.generate.markdown import code, page, prose, table
from pipeline.cli.app import app

EXIT_CODES = (
    ("0", "complete, or the command did what it says"),
    ("1", "failed: a task was given up, Slurm does not answer, try, doctor or rehearse found a problem"),
    ("2", "usage or configuration: one line says what, where, and the way out"),
    ("3", "incomplete: a run that was interrupted, or `status` of one that is not done"),
    ("130", "Ctrl-C anywhere else"),
)

ABOUT = """\
Where a command takes `OVERRIDES`, they are [settings](config.md): `key=value`, or `group=option`. `RUN` is a
run directory; `RUN@7` means its iteration 7, `RUN@best` the best that was evaluated."""


def command_page() -> str:
    parts = [_command(name, command) for name, command in _commands("slurm-ppo", typer.main.get_command(app))]
    codes = "## Exit codes\n\n" + table(("code", "means"), EXIT_CODES)
    return page("Commands", ABOUT, codes, *parts)


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every command that people type, depth first, groups before their commands."""
    yield name, command
    for inner, found in getattr(command, "commands", {}).items():
        if not found.hidden:
            yield from _commands(f"{name} {inner}", found)


def _command(name: str, command: Any) -> str:
    parameters = command.params
    rows = [(code(_shown(p)), _default(p), prose(p.help)) for p in parameters]
    return "\n\n".join(
        [
            f"## {name}",
            prose(command.help),
            f"```text\n{name} {_usage(command, parameters)}\n```",
            table(("argument or option", "default", "meaning"), rows) if rows else "",
        ]
    )


def _usage(command: Any, parameters: list[Any]) -> str:
    options = ["[OPTIONS]"] if any(p.param_type_name == "option" for p in parameters) else []
    inner = ["COMMAND"] if getattr(command, "commands", None) else []
    return " ".join(options + [_shown(p) for p in parameters if p.param_type_name == "argument"] + inner)


def _shown(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        value = "" if parameter.is_flag else f" {parameter.metavar or _value(parameter)}"
        return " / ".join([*parameter.opts, *parameter.secondary_opts]) + value
    name = parameter.metavar or parameter.name.upper()
    return f"[{name}]..." if parameter.nargs == -1 and not parameter.required else name


def _value(parameter: Any) -> str:
    return "NUMBER" if isinstance(parameter.default, int | float) and parameter.default else "VALUE"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "must be given"
    if parameter.default in (None, (), [], False) or callable(parameter.default):
        return ""
    return "on" if getattr(parameter, "is_flag", False) else code(str(parameter.default))
