"""Command lines as people may type them, by chance: each command of the app, right and wrong arguments.

Commands and their parameters are the app's own, so that a new one is typed as well.
"""

import random
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer.main

from pipeline.cli.app import app
from tests.support.tables import SEED

SETTINGS = "SETTINGS"
"""Stands for all that a run needs."""


@dataclass(frozen=True)
class Parameter:
    """An argument or option of a command."""

    options: tuple[str, ...]
    """Ways to write it; none of an argument."""
    metavar: str
    kind: type
    """Type of its values: bool, int, float, str or Path."""
    is_many: bool
    is_required: bool

    @property
    def is_run(self) -> bool:
        return "RUN" in self.metavar.split("|")[0] and self.metavar != "NEW_RUN"


@dataclass(frozen=True)
class Command:
    """A command of the app."""

    words: tuple[str, ...]
    parameters: tuple[Parameter, ...]


def all_commands() -> list[Command]:
    """Every command there is, hidden ones too."""
    return list(_below(typer.main.get_command(app), ()))


def _below(node: Any, words: tuple[str, ...]) -> Iterator[Command]:
    if not hasattr(node, "commands"):
        yield Command(words, tuple(map(_parameter, node.params)))
        return
    for name, inner in node.commands.items():
        yield from _below(inner, (*words, name))


def _parameter(found: Any) -> Parameter:
    kind, is_many = _value_type(found.type_descriptor.annotation)
    is_option = found.opts[0].startswith("-")
    options = (*found.opts, *found.secondary_opts) if is_option else ()
    return Parameter(options, found.metavar or "", kind, is_many, found.required)


def _value_type(annotation: Any) -> tuple[type, bool]:
    """The type of one value, and whether there may be several."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return _value_type(next(one for one in typing.get_args(annotation) if one is not type(None)))
    if typing.get_origin(annotation) is list:
        return typing.get_args(annotation)[0], True
    return annotation, False


# --- values ---

RIGHT_NUMBERS = ("1", "2", "3")
RIGHT_ITERATIONS = ("", "@1", "@2")
RIGHT_POINTS = ("rollout", "reward", "update", "evaluate")
NUMBERS = ("0", "1", "2", "3", "-1", "99", "1e3", "nan", "x", "", "1.5", "9" * 30)
ITERATIONS = ("", "", "@1", "@2", "@3", "@0", "@-1", "@99", "@x", "@", "@best", "@1@2", f"@{'9' * 400}")
POINTS = (
    *("rollout", "reward", "update", "evaluate", "score", "prepare", "driver", "benchmark", "state"),
    *("bake", "", "Rollout", "score-nobody", "score-", "rollout/0", "-", "\x1b[31m"),
)
ODD_PLACES = (
    *("nothing", "nothing/at/all", "file", "folder", "", ".", "..", "/dev/null", "/proc/self", "~nobody"),
    *("file/below", "complet", "complete/", "complete/run.json", "complete/iterations", "pipe", "looped"),
    *("x" * 300, "a/" * 2500, "two\nlines", "\x1b[31mred", "a b", "-x", "--", "*", "${x}", "na\udcffme"),
)
NEW_PLACES = ("new", "new.html", "folder/new")
KEYS = (
    *("seed", "iterations", "name", "run_dir", "model.policy", "data.prompts", "update.learning_rate"),
    *("rollout.num_shards", "rollout.max_new_tokens", "scheduler", "scheduler.slots", "algorithm", "reward"),
    *("scheduler.max_attempts", "data.id_column", "tracking", "notify.on", "update.keep_last", "update"),
    *("sed", "update.learning_rat", "model", "evaluate.every", "data.heldout", "reward.components.rm.path"),
    *("algorithm.gamma", "scheduler.rollout.partition", "x.y.z", "", "=", "~seed", "+new", "++seed"),
)
VALUES = (
    *("1", "0", "-1", "1.5", "nan", "inf", "null", "true", "x", "", "[1,2]", "[", "{a: 1}", "{", "slurm"),
    *("1,2", "local", "ppo", "grpo", "nothing", "file", "folder", "pipe", "/dev/null", "/proc/x", "'"),
    *("9" * 400, "${oc.env:NOT_THERE}", "${seed}", "range(0,3)", "glob(*)", "\x00", "ü", "a\nb", "[[" * 200),
)
TEXTS = ("p1", "x", "", "\x1b[31m", "na\udcffme", "x" * 5000, "superseded", "logs", "states", "bash", "zsh")


@dataclass(frozen=True)
class Typist:
    """Types command lines at runs that lie in the folder they are typed in."""

    runs: Sequence[str]
    """Names of the runs."""
    care: float = 0.5
    """Share of words that are right, as far as words can be by themselves."""
    chance: random.Random = field(default_factory=random.Random)
    fixed: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    """By metavar, what makes the value, which is always given: any other, or none, would lead too far."""

    def line(self, command: Command) -> list[str]:
        """Words of a command line, without the program's name."""
        words = list(command.words)
        for parameter in command.parameters:
            words += self._words_of(parameter)
        if self._happens(0.1 * (1 - self.care)):
            words.insert(self.chance.randrange(len(words) + 1), self.chance.choice(("--", "--nothing", "-h")))
        return [word.replace("\x00", "") for word in words]  # no program can be given one

    def _words_of(self, parameter: Parameter) -> list[str]:
        share = 0.3 if parameter.options else 0.97 if parameter.is_required else 0.8
        if not (self._is_fixed(parameter) or self._happens(share)):
            return []
        if parameter.kind is bool:
            return [self.chance.choice(parameter.options)]
        if parameter.is_many and parameter.kind is str and not parameter.options:
            return self._settings()
        count = self.chance.choice((1, 1, 2)) if parameter.is_many else 1
        values = [self._value(parameter) for _ in range(count)]
        if not parameter.options:
            return values
        return [word for value in values for word in (parameter.options[0], value)]

    def _is_fixed(self, parameter: Parameter) -> bool:
        return parameter.metavar in self.fixed

    def _value(self, parameter: Parameter) -> str:
        if self._is_fixed(parameter):
            return self.fixed[parameter.metavar]()
        if "@ITERATION" in parameter.metavar:
            is_point = parameter.metavar.strip("[").startswith("STAGE")
            first = self._one_of(RIGHT_POINTS, POINTS) if is_point else self.place()
            return first + self._one_of(RIGHT_ITERATIONS, ITERATIONS)
        if parameter.kind is Path:
            return self.place() if parameter.is_run else self._one_of(NEW_PLACES, (*self.runs, *ODD_PLACES))
        if parameter.kind in (int, float):
            return self._one_of(RIGHT_NUMBERS, NUMBERS)
        return self.chance.choice(TEXTS)

    def place(self) -> str:
        return self._one_of(self.runs, ODD_PLACES)

    def _one_of(self, right: Sequence[str], wrong: Sequence[str]) -> str:
        return self.chance.choice(right if self._happens(self.care) else wrong)

    def _settings(self) -> list[str]:
        """Settings, most often with something wrong; or a run; or both."""
        if self._happens(0.35):
            return [self.place()]
        words = [SETTINGS] if self._happens(0.9) else []
        words += [self._setting() for _ in range(self.chance.choice((1, 1, 2, 3)))]
        return words + ([self.place()] if self._happens(0.1) else [])

    def _setting(self) -> str:
        if self._happens(0.2):
            return f"run_dir={self.place()}"
        return f"{self.chance.choice(KEYS)}={self.chance.choice(VALUES)}"

    def _happens(self, share: float) -> bool:
        return self.chance.random() < share


def chance_of(what: str) -> random.Random:
    """Chance that is the same for everyone who tests this commit."""
    return random.Random(f"{SEED}/{what}")
