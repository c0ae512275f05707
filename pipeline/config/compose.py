"""From Hydra groups and overrides to one checked :class:`Config`. Happens once, at the edge.

Hydra merges plain YAML over the defaults of the dataclasses; pydantic converts;
:mod:`pipeline.config.resolve` refuses contradictions. All problems are reported together, each with its key,
the offending value and what is legal.
"""

import copy
import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from pipeline.config.choices import (
    chosen_files,
    known_groups,
    misplaced,
    packaged_configs,
    without_superseded,
)
from pipeline.config.conversion import as_yaml, converted, from_yaml, plain
from pipeline.config.findings import Findings, without_problems
from pipeline.config.home import why_no_home, with_homes
from pipeline.config.issue import ConfigError, Mistake
from pipeline.config.keys import LONGEST_VALUE, alternatives, cut, fields_of, mistake_in_key, with_legal
from pipeline.config.peers import OPTIONS
from pipeline.config.schema import Config
from pipeline.config.wording import is_missing, location_of, mistakes_in

_MISSING = "???"
_ROUNDS = 4
"""Times that what is wrong is left out: what takes its place may be wrong again, such as an empty section."""
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
    return without_problems(lambda found: compose_what_can_be(overrides, config_dir, found, base))


def compose_what_can_be(
    overrides: Sequence[str], config_dir: Path | None, found: Findings, base: Mapping[str, Any] | None = None
) -> Config | None:
    """Compose as :func:`compose` does, and add what is wrong to ``found``. Returns the configuration, with
    defaults in place of what is wrong, for other checks; None where nothing can be composed."""
    if config_dir is not None and (wrong := _is_no_config_dir(config_dir)):
        found.add([f"--config-dir {config_dir}: {wrong}"])
        return None
    sound, mistakes = sorted_out(overrides, known_groups(config_dir))
    found.add_mistakes(mistakes)
    with found.collecting("files of settings"):
        data, choices = _hydra_compose(sound, config_dir, base)
        elsewhere = list(misplaced(chosen_files(config_dir, choices)))
        found.add_mistakes(elsewhere)
        for key in [*(mistake.key for mistake in elsewhere), *(choices.keys() - fields_of(Config).keys())]:
            remove(data, key.split("."))
        found.add(_missing_prompts(data.get("data")))
        return _converted(with_homes(without_superseded(data, sound, config_dir)), found)
    return None


def _missing_prompts(data: Any) -> list[str]:
    """Return that a run has no prompts, neither of a file nor of environments, if that is so."""
    given = data if isinstance(data, Mapping) else {}
    if any(given.get(key) is not None for key in ("prompts", "environment")):
        return []
    return ["data.prompts: must be given, e.g. data.prompts=FILE, or data.environment instead"]


def from_mapping(data: Mapping[str, Any]) -> Config:
    """Convert a plain mapping. Raises ConfigError naming every unknown key and illegal value."""
    return without_problems(lambda found: _converted(data, found))


def _converted(data: Mapping[str, Any], found: Findings) -> Config | None:
    """Convert a mapping, or what is left of it without what is wrong."""
    rest = _with_stage_defaults(_given(data))
    for turn in range(_ROUNDS):
        try:
            return converted(Config, rest)
        except ValidationError as error:
            problems = error.errors()
        if turn == 0:  # later ones are about what was put in place of others
            for mistakes in mistakes_in(problems):
                found.add_mistakes(mistakes)
        rest = without(rest, problems)
    return None


def _given(data: Any) -> Any:
    """Return a configuration without keys that nothing has given a value."""
    if not isinstance(data, Mapping):
        return data
    return {key: _given(value) for key, value in data.items() if value != _MISSING}


def _with_stage_defaults(data: Any) -> Any:
    """Return a configuration in which a stage of the scheduler keeps the defaults that are its own, such as
    the driver's time, beside what it is given: they are those of a whole section, which pydantic replaces."""
    given = data.get("scheduler") if isinstance(data, Mapping) else None
    if not isinstance(given, Mapping):
        return data
    kinds = {kind.kind: kind for kind in alternatives(fields_of(Config)["scheduler"])}
    known = kinds.get(str(given.get("kind", "local")))
    own = {field.name: _own_defaults(field.default) for field in dataclasses.fields(known)} if known else {}
    stages = {
        name: {**own[name], **value}
        for name, value in given.items()
        if own.get(name) and isinstance(value, Mapping)
    }
    return {**data, "scheduler": {**given, **stages}}


def _own_defaults(section: Any) -> dict[str, Any]:
    """Return the values of a section in which it differs from others of its type."""
    if not dataclasses.is_dataclass(section) or isinstance(section, type):
        return {}
    usual, own = plain(type(section)()), plain(section)
    return {key: value for key, value in own.items() if value != usual[key]}


def to_mapping(config: Config) -> dict[str, Any]:
    """Return a configuration as plain values, as YAML holds them."""
    return plain(config)


def to_yaml(config: Config) -> str:
    return as_yaml(to_mapping(config))


def _is_no_config_dir(folder: Path) -> str | None:
    """Say why a folder can hold no groups: a folder in it makes a group of the key of its name."""
    if not folder.is_dir():
        return "no such directory"
    hints = typing.get_type_hints(Config).items()
    keys = [key for key, hint in hints if not (dataclasses.is_dataclass(hint) or alternatives(hint))]
    if wrong := next((key for key in keys if (folder / key).is_dir()), None):
        groups = f"give a folder of groups, such as {', '.join(known_groups(None))}"
        return f"its folder {wrong} has the name of a key that is not a group; {groups}"
    return None


def _hydra_compose(
    overrides: Sequence[str], config_dir: Path | None, base: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the groups and overrides give, and the options that were chosen by their groups."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
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
            composed = hydra_compose("slurm_ppo", overrides=words, return_hydra_config=True)
        choices = dict(composed.hydra.runtime.choices)
        with open_dict(composed):
            del composed["hydra"]  # not whole outside of an application of Hydra
        return typing.cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True)), choices
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
        if sum(map(dataclasses.is_dataclass, alternatives(hints[field.name]))) > 1:
            values[field.name] = {}  # a group says which; the defaults of one would not fit the other
        elif field.default is not dataclasses.MISSING:
            values[field.name] = to_jsonable_python(field.default)
        elif dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = _defaults(hints[field.name])
        else:
            values[field.name] = {} if typing.get_origin(hints[field.name]) is dict else _MISSING
    return values


# --- what is left without what is wrong ---

NOT_GIVEN = "/"
_FILLING: dict[str, Any] = {"model": {"policy": NOT_GIVEN}, "data": {}}
"""Values in place of those that have no default. They are never shown: the only message
about such a key is that it must be given."""
_DEPTH_OF_SECTION = 2
"""Parts of a key right below a section, which has what else it holds when such a key is missing."""
_COMPONENT = {"rest": {"kind": "remote", "url": "http://localhost/", "api": "plain", "trial": False}}
"""A component of the reward of which nothing can be checked."""


def without(data: Mapping[str, Any], problems: Iterable[Any]) -> dict[str, Any]:
    """Return a configuration with defaults in place of what pydantic's errors name."""
    rest = copy.deepcopy(dict(data))
    for problem in problems:
        location, _ = location_of(problem)
        if not is_missing(problem):
            remove(rest, location)
        elif len(location) > _DEPTH_OF_SECTION:
            remove(rest, location[:-1])
    for section, filling in _FILLING.items():
        rest[section] = filling | (rest.get(section) or {})
    if not rest.setdefault("reward", {}).get("components"):
        rest["reward"]["components"] = _COMPONENT
    return rest


def remove(rest: dict[str, Any], location: Sequence[str]) -> None:
    """Remove an entry; of something in a list the whole list."""
    *above, last = location
    for part in above:
        if not isinstance(rest.get(part), dict):
            last = part
            break
        rest = rest[part]
    rest.pop(last, None)


# --- words that Hydra would misunderstand, drop or let through ---


def sorted_out(
    overrides: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> tuple[list[str], list[Mistake]]:
    """Return the overrides that can be composed, and what is wrong with the others: an unknown key (with or
    without +), a deletion, a sweep, or not of the form KEY=VALUE.

    Args:
        groups: options of each config group.
    """
    found = {text: _mistake(text, groups) for text in overrides}
    return [text for text in overrides if found[text] is None], [one for one in found.values() if one]


def _mistake(text: str, groups: Mapping[str, Sequence[str]]) -> Mistake | None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError):  # thousands of digits, or of brackets
        name, _, value = text.partition("=")
        if why := why_no_home(value):
            return Mistake(name.lstrip("+"), f"{name}={value[:LONGEST_VALUE]}: {why}")
        why = "is not an override; write KEY=VALUE (quote values with special characters: \"KEY='a=b'\")"
        return Mistake(text.partition("=")[0].lstrip("+~"), f"{cut(text)} {why}")
    key = override.key_or_group
    if not key:
        return Mistake("", f"{cut(text)} names no key; write KEY=VALUE")
    if override.is_delete():
        return Mistake(key, f"{text!r}: keys cannot be deleted; give {key} another value instead")
    if override.is_sweep_override():
        why = "one value per key; slurm-ppo sweep takes several; else quote the comma"
        return Mistake(key, f"{text!r}: {why}")
    if key not in groups:
        return mistake_in_key(key, groups)
    if override.value() in groups[key]:
        return None
    return Mistake(key, _no_option(key, str(override.value()), groups[key]))


def _no_option(group: str, given: str, options: Sequence[str]) -> str:
    """Say that a group has no such option, and which is meant where that is clear."""
    own = {option.lower(): f"{group}={option}" for option in options}
    meant = own.get(given.lower()) or OPTIONS.get(f"{group}={given}".lower())
    text = f"{group}={given[:LONGEST_VALUE]}: no such option"
    if meant:
        return f"{text}; here: {meant}"
    return f"{with_legal(text, given[:LONGEST_VALUE], options)}; files of your own: --config-dir FOLDER"
