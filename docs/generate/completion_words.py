"""pipeline/cli/completion/words.json: what the Tab key offers, from the command line and the configuration.

A table that is read in a millisecond; the modules that it is made from take half a second to import.
"""

import json
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer.main

from docs.generate.config_page import dataclasses_of
from pipeline.cli.app import app
from pipeline.cli.completion.answer import FILES
from pipeline.config.choices import known_groups
from pipeline.config.engines import AUTO, EngineName, GeneratorName
from pipeline.config.job_kinds import DRIVER
from pipeline.config.schema import Config
from pipeline.config.types import Paths, Text, ZeroStage
from pipeline.run.tasks import WORK_STAGES

PATH = Path(__file__).parents[2] / "pipeline/cli/completion/words.json"

RUN_OR_OVERRIDES = frozenset({"submit", "config", "plan", "notify", "doctor", "rehearse"})
"""Commands that take settings, or one run directory."""
OF_OPTIONS = {"--config-dir": "folder", "--out": FILES}
"""Kinds of the values of options that have no metavar."""
ENGINES = ["transformers", "vllm"]


def completion_words() -> str:
    root = _node("", typer.main.get_command(app))
    table = {
        **root,
        "keys": _values_by_key(),
        "groups": known_groups(None),
        "stages": list(map(str, WORK_STAGES)),
        "logs": [*map(str, WORK_STAGES), DRIVER],
    }
    return json.dumps(table, indent=1) + "\n"


def _node(name: str, command: Any) -> dict[str, Any]:
    """A command: kinds of its arguments, kinds of its options' values (null: none), commands in it."""
    options: dict[str, str | None] = {}
    arguments = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            several = "..." if parameter.nargs == -1 else ""
            arguments.append(_kind(name, parameter.metavar or parameter.name.upper()) + several)
        else:
            for word in [*parameter.opts, *parameter.secondary_opts]:
                options[word] = None if parameter.is_flag else _kind_of_option(word, parameter.metavar)
    found: dict[str, Any] = {"options": options}
    if inner := getattr(command, "commands", {}):
        return found | {"commands": {key: _node(key, one) for key, one in inner.items() if not one.hidden}}
    return found | {"arguments": arguments}


def _kind(command: str, metavar: str) -> str:
    """What an argument is, by how it is called in --help."""
    if "OVERRIDES" in metavar:
        return "run|overrides" if "RUN" in metavar or command in RUN_OR_OVERRIDES else "overrides"
    if "RUN" in metavar and metavar != "NEW_RUN":
        return "source" if "@" in metavar else "run"
    if "STAGE" in metavar:
        return "logs" if command == "logs" else "stages"
    if "SHELL" in metavar:
        return "shell"
    return "folder" if "DIR" in metavar or metavar == "NEW_RUN" else ""


def _kind_of_option(word: str, metavar: str | None) -> str:
    return OF_OPTIONS.get(word, "") if metavar is None else _kind("", metavar)


def _values_by_key() -> dict[str, list[str] | str]:
    """The values of every key; of one that several kinds of a section have, those of all."""
    found: dict[str, list[str] | str] = {}
    for key, values in sorted(_keys("", Config), key=lambda pair: pair[0]):
        before = found.get(key, [])
        is_path = FILES in (before, values)
        found[key] = FILES if is_path else list(dict.fromkeys([*before, *values]))
    return found


def _keys(path: str, owner: type) -> Iterator[tuple[str, list[str] | str]]:
    """Each key with its values: a list, perhaps empty, or :data:`FILES`. ``*`` stands for a user's name."""
    for name, hint in typing.get_type_hints(owner, include_extras=True).items():
        inner = f"{path}.{name}" if path else name
        nested = list(dataclasses_of(hint))
        for one, in_mapping in nested:
            yield from _keys(f"{inner}.*" if in_mapping else inner, one)
        if not nested:
            yield inner, _values(hint)


def _values(hint: Any) -> list[str] | str:
    if any(one in (Text, Paths) for one in (hint, *get_args(hint))):
        return FILES
    return list(dict.fromkeys(_each_value(hint)))


def _each_value(hint: Any) -> Iterator[str]:
    if hint is EngineName:
        yield from ENGINES
    elif hint is GeneratorName:
        yield from (AUTO, *ENGINES)
    elif hint is ZeroStage:
        yield from (AUTO, "0", "1", "2", "3")
    elif hint is bool:
        yield from ("true", "false")
    elif hint is types.NoneType:
        yield "null"
    elif isinstance(hint, type) and issubclass(hint, Enum):
        yield from (str(member.value) for member in hint)
    elif get_origin(hint) is Literal:
        yield from map(str, get_args(hint))
    elif get_origin(hint) is Annotated:
        yield from _each_value(get_args(hint)[0])
    elif get_origin(hint) in (typing.Union, types.UnionType):
        yield from (value for option in get_args(hint) for value in _each_value(option))
