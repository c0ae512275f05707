"""From Hydra groups and overrides to one checked :class:`Config`. Happens once, at the edge.

Hydra merges plain YAML over the defaults of the dataclasses; pydantic converts;
:mod:`pipeline.config.resolve` refuses contradictions. All problems of one kind are reported together, each
with its key, the offending value and what is legal.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from pipeline.config.choices import packaged_configs, without_superseded
from pipeline.config.conversion import converted, from_yaml, plain
from pipeline.config.issue import ConfigError
from pipeline.config.reward import KINDS
from pipeline.config.schema import Config

_MISSING = "???"
_LONGEST_LINE, _LONGEST_VALUE = 290, 80
_CHOICES = ("scheduler", "reward")
"""Groups whose options do not mix: a newly chosen one replaces all settings of the one before."""


def compose(
    overrides: Sequence[str], config_dir: Path | None = None, base: Mapping[str, Any] | None = None
) -> Config:
    """Compose ``configs/config.yaml`` with ``overrides``; groups in ``config_dir`` come first.

    Args:
        base: a whole configuration in place of the groups' usual options. Options that are chosen are laid
            over it; those of ``scheduler`` and ``reward`` replace their part of it.

    Raises:
        ConfigError: anything wrong with a key, a type, a value or a group.
    """
    if config_dir is not None:
        _check_config_dir(config_dir)
    check_overrides(overrides, known_groups(config_dir))
    data = _hydra_compose(overrides, config_dir, base)
    return from_mapping(without_superseded(data, overrides, config_dir))


def from_mapping(data: Mapping[str, Any]) -> Config:
    """Convert a plain mapping. Raises ConfigError naming every unknown key and illegal value."""
    missing = [key for key, value in _leaves(data) if value == _MISSING]
    if missing:
        raise ConfigError("\n".join(f"{key}: must be given, e.g. {key}=..." for key in missing))
    try:
        return converted(Config, data)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(problem) for problem in error.errors())) from None


def to_mapping(config: Config) -> dict[str, Any]:
    """Return a configuration as plain values, as YAML holds them."""
    return plain(config)


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(to_mapping(config), sort_keys=False, width=110)


def _check_config_dir(folder: Path) -> None:
    """Raise ConfigError unless a folder can hold groups: folders in it make groups of keys of their names."""
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {folder}: no such directory")
    hints = typing.get_type_hints(Config).items()
    keys = [key for key, hint in hints if not (dataclasses.is_dataclass(hint) or _alternatives(hint))]
    if wrong := next((key for key in keys if (folder / key).is_dir()), None):
        raise ConfigError(
            f"--config-dir {folder}: its folder {wrong} has the name of a key that is no group; give "
            f"a folder of groups, such as {', '.join(known_groups(None))}"
        )


def known_groups(config_dir: Path | None) -> dict[str, list[str]]:
    """List config groups and their options, the packaged ones and the user's."""
    groups: dict[str, list[str]] = {}
    for root in [packaged_configs(), *([config_dir] if config_dir else [])]:
        for file in sorted(root.glob("*/*.yaml")):
            groups.setdefault(file.parent.name, []).append(file.stem)
    return {name: sorted(set(options)) for name, options in groups.items()}


def check_overrides(overrides: Sequence[str], groups: Mapping[str, Sequence[str]]) -> None:
    """Refuse overrides that Hydra would misunderstand, drop or let through.

    Raises:
        ConfigError: an unknown key (with or without +), a deletion, a sweep, or not of the form KEY=VALUE.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except (HydraException, ValueError):  # ValueError: a number of thousands of digits
            raise ConfigError(
                f"{_cut(text)} is not an override; write KEY=VALUE (quote values with special characters: "
                f"\"KEY='a=b'\")"
            ) from None
        key = override.key_or_group
        if not key:
            raise ConfigError(f"{_cut(text)} names no key; write KEY=VALUE")
        if override.is_delete():
            raise ConfigError(f"{text!r}: keys cannot be deleted; give {key} another value instead")
        if override.is_sweep_override():
            raise ConfigError(
                f"{text!r}: one value per key; slurm-ppo sweep takes several; else quote the comma"
            )
        if key not in groups:
            _check_key(key, groups)
        elif override.value() not in groups[key]:
            given = str(override.value())[:_LONGEST_VALUE]
            raise ConfigError(_with_legal(f"{key}={given}: no such option", given, groups[key]))


def _check_key(key: str, groups: Mapping[str, Sequence[str]]) -> None:
    """Refuse a key that the dataclasses do not have, walking them along its dots. Raises ConfigError."""
    node: Any = Config
    if _fields_of(_fields_of(Config).get(key)):
        raise ConfigError(f"{key}: holds several keys; set one of them, e.g. {key}.KEY=VALUE")
    done: list[str] = []
    for part in key.split("."):
        if _is_mapping(node):
            return  # reward.components.NAME...: names are the user's, pydantic checks what is below
        legal = _fields_of(node)
        if not legal:
            value = ".".join(done)
            raise ConfigError(f"{key}: {value} holds one value and no keys; write {value}=VALUE")
        if part not in legal:
            where = f"in {'.'.join(done)}" if done else "at the top"
            names = [*legal, *([] if done else sorted(set(groups) - set(legal)))]
            unknown = f"{key[:_LONGEST_VALUE]}: unknown key {_cut(part)} {where}"
            raise ConfigError(_with_legal(unknown, part, names))
        done.append(part)
        node = legal[part]


def _fields_of(node: Any) -> dict[str, Any]:
    """Return field name -> type of a dataclass or a union of them; empty for anything else."""
    if dataclasses.is_dataclass(node):
        return typing.get_type_hints(node)
    fields: dict[str, Any] = {}
    for option in _alternatives(node):
        for name, kind in _fields_of(option).items():
            fields[name] = fields[name] | kind if name in fields and fields[name] != kind else kind
    return fields


def _alternatives(node: Any) -> tuple[Any, ...]:
    """Return the types of a union; none for anything else."""
    is_union = typing.get_origin(node) in (types.UnionType, typing.Union)
    return typing.get_args(node) if is_union else ()


def _is_mapping(node: Any) -> bool:
    """Whether a type is a dictionary, or a union with one."""
    return any(typing.get_origin(option) is dict for option in (node, *_alternatives(node)))


def _with_legal(problem: str, word: str, names: Sequence[str]) -> str:
    """Append the legal names to a problem: as many of them as a line has room for."""
    shown, more, close = list(names), "", difflib.get_close_matches(word, names, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    while len(line := f"{problem}; legal: {', '.join(shown)}{more}{hint}") > _LONGEST_LINE and shown:
        shown.pop()
        more = f" and {len(names) - len(shown)} more (slurm-ppo config shows all)"
    return line


def _hydra_compose(
    overrides: Sequence[str], config_dir: Path | None, base: Mapping[str, Any] | None
) -> dict[str, Any]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    store = ConfigStore.instance().store
    store(name="dataclass_defaults", node=_defaults(Config))
    packaged = packaged_configs().absolute()
    # Hydra looks for the top file in the first folder only, which may be the user's and have none.
    top = from_yaml((packaged / "config.yaml").read_text())
    if base is not None:  # the base comes after the dataclasses' defaults, and no option is chosen
        store(name="base", node=_without_chosen(base, overrides))
        first, *groups = top["defaults"]
        top["defaults"] = [first, "base", *(g if isinstance(g, str) else dict.fromkeys(g) for g in groups)]
    store(name="slurm_ppo", node=top)
    quoted = f"file://{packaged}".replace("'", "\\'")
    words = [
        f"hydra.searchpath=['{quoted}']",
        *(word for text in overrides for word in _as_hydra_takes_it(text)),
    ]
    try:
        with initialize_config_dir(str((config_dir or packaged).absolute()), version_base="1.3"):
            composed = hydra_compose("slurm_ppo", overrides=words)
        return typing.cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        parts = [str(error), *([str(error.__cause__)] if error.__cause__ else [])]
        lines = [line.strip() for part in parts for line in part.splitlines() if line.strip()]
        raise ConfigError("; ".join(dict.fromkeys(lines))) from None


def _without_chosen(base: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a whole configuration without the parts whose options are chosen now."""
    chosen = {text.lstrip("+").split("=", 1)[0] for text in overrides} & set(_CHOICES)
    kept = {key: value for key, value in base.items() if key not in chosen}
    if "reward" in chosen and "scheduler" in kept:  # its pools are those of components that are gone
        kept["scheduler"] = {key: value for key, value in kept["scheduler"].items() if key != "pools"}
    return kept


def _as_hydra_takes_it(text: str) -> list[str]:
    """Return an override as Hydra takes it: with ``++``, which lets it set keys that no YAML file names.

    Keys were checked against the dataclasses before. Hydra merges mappings, so that an empty one would
    change nothing; the key is set to null first.
    """
    key, _, value = text.partition("=")
    if "." not in key:
        return [text]
    key = f"++{key.lstrip('+')}"
    return [f"{key}=null", f"{key}={{}}"] if value.replace(" ", "") == "{}" else [f"{key}={value}"]


def _defaults(node: Any) -> dict[str, Any]:
    """Return the dataclass tree's defaults as plain values; required fields as Hydra's ``???``."""
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(node)
    for field in dataclasses.fields(node):
        if sum(map(dataclasses.is_dataclass, _alternatives(hints[field.name]))) > 1:
            values[field.name] = {}  # a group says which; the defaults of one would not fit the other
        elif field.default is not dataclasses.MISSING:
            values[field.name] = to_jsonable_python(field.default)
        elif dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = _defaults(hints[field.name])
        else:
            values[field.name] = {} if typing.get_origin(hints[field.name]) is dict else _MISSING
    return values


def _leaves(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, data


_WORDING = {
    "function": "module:function, or the name of a ready rule such as exact_match",
    "url": "an address such as http://gpu07:8000/classify, without user name and password",
    "mail_user": "an address such as me@example.org, or a user's name",
    "webhook": "an address such as http://relay:8080/notify, without user name and password",
    "webhook_env": "the name of an environment variable; the address itself belongs into no file",
    "api_key_env": "the name of an environment variable; the key itself belongs into no file",
    "scheduler": "module:function",
    "engine": "transformers, vllm, or module:function of an engine of yours",
    "device_map": "auto, balanced, balanced_low_0, sequential, or a device such as cuda:0",
    "pool": "a word of lower-case letters, digits and '_'",
    "time": "D-HH:MM:SS or HH:MM:SS, in quotes because YAML takes 4:00:00 for the number 14400",
    "mem": "a number with K, M, G or T behind it, such as 64G",
    "max_mem": "a number with K, M, G or T behind it, such as 64G",
    "gpus_per_node": "COUNT or TYPE:COUNT, such as 4 or a100:4",
}


def _options(group: str) -> str:
    return ", ".join(f"{group}={option}" for option in known_groups(None)[group])


def _location(given: Sequence[str | int]) -> tuple[list[str], str]:
    """Return the parts of a key, and the union's tag that pydantic puts among them, where it puts one."""
    location = [str(part) for part in given if part != "[key]"]  # marks an invalid name in a mapping
    if location[:2] == ["reward", "components"] and len(location) > 3:
        return location, location.pop(3)
    if location[:1] == ["scheduler"] and len(location) > 1:
        return location, location.pop(1)
    return location, ""


def _describe(problem: Any) -> str:
    """Describe one pydantic error as ``key: what is wrong (got value)``."""
    location, kind = _location(problem["loc"])
    key, sort, given = ".".join(location) or "config", problem["type"], problem["input"]
    got, is_component = f"(got {_cut(given)})", location[:2] == ["reward", "components"]
    if sort == "unexpected_keyword_argument":
        legal = _siblings(location, kind)
        unknown = f"{key}: unknown key {location[-1]!r}"
        return _with_legal(unknown, location[-1], legal) if legal else unknown
    if sort == "dataclass_type":
        keys = ", ".join(_siblings([*location, ""], kind))
        return f"{key}: holds several keys; set one of them: {keys} {got}"
    if sort == "dict_type":
        return f"{key}: holds entries that you name; write {key}.NAME=... {got}"
    if sort == "string_pattern_mismatch" or (sort == "string_type" and location[-1] in _WORDING):
        is_pool = location[:2] == ["scheduler", "pools"] and len(location) == 3
        wanted = _WORDING.get("pool" if is_pool else location[-1], "letters, digits, '_', '.' and '-'")
        return f"{key}: write {wanted} {got}"
    if sort in ("missing", "missing_argument"):
        return f"{key}: must be given"
    if sort == "union_tag_not_found" and key == "scheduler":
        return f"scheduler: says no kind; choose {_options('scheduler')}"
    if sort == "union_tag_not_found":
        named = (", ".join(map(str, given)) if isinstance(given, dict) else repr(given))[:_LONGEST_VALUE]
        return (
            f"{key}: says no kind, only {named}; add {key}.kind=model (with path), "
            "kind=rule (with function) or kind=remote (with url), or choose reward=model, rule or remote"
        )
    if sort == "union_tag_invalid" and is_component:
        tag = str(problem["ctx"]["tag"])[:_LONGEST_VALUE]
        return _with_legal(f"{key}.kind={tag}: no such kind", tag, KINDS)
    if sort == "too_short" and key == "reward.components":
        return f"{key}: must be given; choose {_options('reward')}"
    wrong = f"write a list, such as {key}=[a,b]" if sort in ("tuple_type", "list_type") else problem["msg"]
    wrong = wrong.removeprefix("Value error, ")
    return f"{key}: {wrong} {got}"


def _cut(value: Any) -> str:
    """Return a value as it was given, or its beginning where it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _siblings(location: Sequence[str], kind: str) -> list[str]:
    """Return the legal names beside the last part of a key; of a union, the ``kind`` that was given."""
    node: Any = Config
    for part in location[:-1]:
        node = typing.get_args(node)[1] if _is_mapping(node) else _fields_of(node).get(part)
        node = next((option for option in _alternatives(node) if getattr(option, "kind", None) == kind), node)
    return sorted(_fields_of(node))
