"""docs/reference/config.md: every key, from the dataclasses of the configuration."""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from docs.generate.docstrings import attribute_docs, member_docs
from docs.generate.markdown import code, page, prose, slug, table
from pipeline.config import engines as engineconfig
from pipeline.config import scheduler as schedulerconfig
from pipeline.config import types as configtypes
from pipeline.config.changeable import effect_of
from pipeline.config.choices import known_groups, packaged_configs
from pipeline.config.schema import Config

WORDS: dict[int, str] = {
    id(found): words
    for found, words in [
        (configtypes.PositiveInt, "integer > 0"),
        (configtypes.NonNegativeInt, "integer >= 0"),
        (configtypes.ZeroStage, "integer from 0 to 3, or `auto`"),
        (configtypes.Days, "integer from 1 to 36500"),
        (configtypes.Seed, "integer from 0 to 2^63 - 1"),
        (configtypes.PositiveFloat, "number > 0"),
        (configtypes.NonNegativeFloat, "number >= 0"),
        (configtypes.FiniteFloat, "number"),
        (configtypes.Fraction, "number from 0 to 1"),
        (configtypes.OpenFraction, "number > 0, up to 1"),
        (configtypes.DecayRate, "number from 0, below 1"),
        (configtypes.Name, "name: letters, digits, `_`, `.`, `-`"),
        (configtypes.Text, "text"),
        (configtypes.Line, "text of one line"),
        (configtypes.WandbLine, "text of one line, up to 128 characters"),
        (configtypes.WandbTag, "text of one line, up to 64 characters"),
        (configtypes.SbatchWord, "one word, as sbatch takes it"),
        (configtypes.Memory, "memory such as `64G`"),
        (configtypes.Gpus, "`COUNT` or `TYPE:COUNT`"),
        (configtypes.TimeLimit, "`D-HH:MM:SS` or `HH:MM:SS`"),
        (configtypes.PluginName, "`module:function`"),
        (configtypes.RuleName, "`module:function` or a rule's name"),
        (configtypes.SourceName, "`module:function` or an environment's name"),
        (configtypes.HttpUrl, "address `http://...` or `https://...`"),
        (configtypes.EnvironmentName, "name of a variable"),
        (configtypes.OptionName, "name of an sbatch option"),
        (configtypes.ArgumentName, "name of an argument"),
        (configtypes.PoolName, "name of a pool: lower case letters, digits, `_`"),
        (engineconfig.EngineName, "`transformers`, `vllm` or `module:function`"),
        (engineconfig.GeneratorName, "`auto`, `transformers`, `vllm` or `module:function`"),
        (schedulerconfig.Names, "one word, or several"),
    ]
}
"""How the types of configtypes are called. By identity: these aliases have no name at run time."""

PLACEHOLDERS = {"components": "NAME", "pools": "POOL"}
"""What stands for the user's own name in keys of a mapping, by the mapping's key."""

GROUPS = """\
Options of each group, and what they set. `GROUP=OPTION` on the command line chooses one; `scheduler=local`,
`algorithm=ppo` and `tracking=wandb` are chosen if you say nothing. Your own are described in
[Change settings](../howto/settings.md#groups-of-your-own)."""


CHANGE = """\
What `slurm-ppo resume RUN KEY=VALUE ...` and `slurm-ppo submit RUN KEY=VALUE ...` take: see
[Change settings](../howto/settings.md#while-a-run-goes-on). All other keys are frozen when a run begins.
A stage cannot get its first GPU, or lose its last, and a run stays on its cluster."""


def config_page() -> str:
    sections = _sections()
    titles = [*sections.values(), "Settings that may change", "Groups"]
    links = " · ".join(f"[{title}](#{slug(title)})" for title in titles)
    texts = [_section(title, owner, sections) for owner, title in sections.items()]
    about = (
        "Every key of the configuration, with type, default and meaning. A key is given as "
        "`section.key=value`, or nested in a YAML file. A key without default must be given."
    )
    change = "## Settings that may change", CHANGE, _changeable(sections)
    return page("Configuration", about, links, *texts, *change, "## Groups", GROUPS, *_groups())


def _changeable(sections: dict[type, str]) -> str:
    """The fields of each dataclass that may change while a run goes on, by when they hold."""
    rows = []
    for owner, title in sections.items():
        names: dict[str, list[str]] = {}
        for field in dataclasses.fields(owner):
            if effect := effect_of(owner, field.name):
                names.setdefault(effect, []).append(code(field.name))
        link = f"[{title}](#{slug(title)})"
        rows += [(link, ", ".join(found), effect) for effect, found in names.items()]
    return table(("section", "keys", "hold from"), rows)


def _sections() -> dict[type, str]:
    """Dataclass -> heading, each dataclass once, in the order of the configuration."""
    paths: dict[type, list[str]] = {}
    for path, owner in _walk("", Config):
        paths.setdefault(owner, []).append(path)
    return {owner: _title(owner, found) for owner, found in paths.items()}


def _walk(path: str, owner: type) -> Iterator[tuple[str, type]]:
    yield path, owner
    for name, hint in typing.get_type_hints(owner, include_extras=True).items():
        inner = f"{path}.{name}" if path else name
        for nested, in_mapping in dataclasses_of(hint):
            yield from _walk(f"{inner}.{PLACEHOLDERS.get(name, 'NAME')}" if in_mapping else inner, nested)


def dataclasses_of(hint: Any, in_mapping: bool = False) -> Iterator[tuple[type, bool]]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint, in_mapping
    for argument in get_args(hint):
        if not isinstance(argument, FieldInfo):
            yield from dataclasses_of(argument, in_mapping or get_origin(hint) is dict)


def _title(owner: type, paths: list[str]) -> str:
    distinct = list(dict.fromkeys(paths))
    if distinct == [""]:
        return "The run"
    parents = {path.rpartition(".")[0] for path in distinct}
    if len(distinct) > 2 and all(parent.split(".")[0] == "scheduler" for parent in parents):
        return f"scheduler.STAGE: {_kind_of(owner)}"
    kind = getattr(owner, "kind", "") or (_kind_of(owner) if distinct[0].startswith("scheduler.") else "")
    return ", ".join(distinct) + (f": {kind}" if kind else "")


def _kind_of(owner: type) -> str:
    kinds = {"Local": "local", "Step": "allocation"}
    return next((kind for word, kind in kinds.items() if owner.__name__.startswith(word)), "slurm")


def _section(title: str, owner: type, headings: dict[type, str]) -> str:
    hints = typing.get_type_hints(owner, include_extras=True)
    rows = [
        (code(field.name), _type(hints[field.name], headings), _shown(field), _meaning(owner, field, hints))
        for field in dataclasses.fields(owner)
    ]
    return f"## {title}\n\n{prose(owner.__doc__)}\n\n" + table(("key", "type", "default", "meaning"), rows)


def _meaning(owner: type, field: dataclasses.Field[Any], hints: dict[str, Any]) -> str:
    values = [
        f"`{value}`: {_as_clause(doc)}"
        for enumeration in _enums_in(hints[field.name])
        for value, doc in member_docs(enumeration).items()
        if doc
    ]
    bases = [base for base in owner.__mro__[:-1] if field.name in vars(base).get("__annotations__", ())]
    return prose(attribute_docs(bases[0]).get(field.name)) + (" " + "; ".join(values) + "." if values else "")


def _as_clause(doc: str) -> str:
    """A sentence as a part of one. Names in capitals, such as those of Slurm's states, keep them."""
    text = prose(doc).rstrip(".")
    is_name = any(letter.isupper() for letter in text.split()[0][1:])
    return text if is_name else text[0].lower() + text[1:]


def _enums_in(hint: Any) -> list[type[Enum]]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [hint]
    return [enumeration for argument in get_args(hint) for enumeration in _enums_in(argument)]


def _type(hint: Any, headings: dict[type, str]) -> str:
    if words := WORDS.get(id(hint)):
        return words
    if hint in headings:
        return f"[{headings[hint]}](#{slug(headings[hint])})"
    if isinstance(hint, type):
        return _plain(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _type(arguments[0], headings)
    if origin is Literal:
        return " or ".join(code(str(value)) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(a, headings) for a in arguments if a is not type(None))
    if origin is tuple:
        return f"list of: {_type(arguments[0], headings)}"
    if origin is dict:
        return f"mapping to: {_type(arguments[1], headings)}"
    return "any value"


def _plain(hint: type) -> str:
    if issubclass(hint, Enum):
        return " or ".join(code(str(member.value)) for member in hint)
    return {bool: "`true` or `false`", int: "integer", float: "number", str: "text"}.get(hint, "any value")


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _shown(field: dataclasses.Field[Any]) -> str:
    default = _default(field)
    if default is dataclasses.MISSING:
        return "must be given"
    if dataclasses.is_dataclass(default):
        return ", ".join(code(f"{key}: {_yaml(value)}") for key, value in _differences(default))
    return code(_yaml(default))


def _differences(value: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        if (found := getattr(value, field.name)) != _default(field) and not dataclasses.is_dataclass(found):
            yield field.name, found


def _yaml(value: Any) -> str:
    """A value as one writes it in a YAML file, on one line."""
    text = yaml.safe_dump(
        to_jsonable_python(value), default_flow_style=True, width=math.inf, allow_unicode=True
    )
    return text.removesuffix("...\n").strip()


def _groups() -> Iterator[str]:
    for group, options in known_groups(None).items():
        rows = [
            (code(f"{group}={option}"), *_option(packaged_configs() / group, option)) for option in options
        ]
        if rows:
            yield f"### {group}\n\n" + table(("option", "what", "sets"), rows)


def _option(folder: Path, name: str) -> tuple[str, str]:
    """What an option's leading comment says, and its settings in one line."""
    path = folder / f"{name}.yaml"
    if not path.is_file():
        return "", "the defaults"
    lines = path.read_text().splitlines()
    comments = [line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line]
    settings = yaml.safe_load(path.read_text()) or {}
    shown = " ".join(code(f"{key}: {value}") for key, value in _leaves("", settings) if key != "defaults")
    return " ".join(comments), shown or "nothing"


def _leaves(prefix: str, settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _leaves(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", "(yours)" if value == "???" else _yaml(value)
