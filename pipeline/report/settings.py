"""Settings by key: those that are not the defaults, and those in which configurations differ. Pure."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pipeline.config.changeable import value_in_words
from pipeline.config.schema import Config
from pipeline.sweep.grid import SEED, plain_number
from pipeline.sweep.naming import short_keys
from pipeline.text import MISSING

_NOTHING = object()
"""Default of a key that has none."""


def settings_apart(config: Config) -> dict[str, Any]:
    """Return key -> plain value, of keys whose value is not the default, and of those that have none."""
    return {key: _plain(value) for key, value, default in _leaves("", config, _NOTHING) if value != default}


def settings_table(configs: Sequence[Config], swept: Collection[str] = ()) -> list[list[str]]:
    """Return key and values, in words, of the settings that are not the same in all configurations.

    A dash where a configuration lacks the key. Left out are names and folders, which always differ, and
    tracking.

    Args:
        swept: keys that a sweep varies. Where no other setting differs, nothing is returned: their values
            name the columns. Without any keys are whole, not their last parts.
    """
    leaves = [
        {key: value_in_words(_plain(value)) for key, value, _ in _leaves("", config, _NOTHING)}
        for config in configs
    ]
    hidden = {"name", "run_dir", "tracking"} | ({SEED} & {*swept})
    keys = dict.fromkeys(key for found in leaves for key in found if key.split(".")[0] not in hidden)
    table = {key: [found.get(key, MISSING) for found in leaves] for key in keys}
    differ = {key: values for key, values in table.items() if len({*values}) > 1}
    if set(differ) <= set(swept):
        return []
    names = short_keys(differ) if swept else {key: key for key in differ}
    return [[names[key], *map(plain_number, values)] for key, values in differ.items()]


def _leaves(key: str, given: Any, default: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value, default) of every value below ``given``."""
    if dataclasses.is_dataclass(given):
        is_same_kind = type(default) is type(given)
        for field in dataclasses.fields(given):
            usual = getattr(default, field.name) if is_same_kind else _default(field)
            yield from _leaves(_below(key, field.name), getattr(given, field.name), usual)
    elif isinstance(given, Mapping) and given:
        usual_values = default if isinstance(default, Mapping) else {}
        for name, value in given.items():
            yield from _leaves(_below(key, name), value, usual_values.get(name, _NOTHING))
    else:
        yield key, given, default


def _default(field: "dataclasses.Field[Any]") -> Any:
    found: Any = field.default
    if found is dataclasses.MISSING and callable(field.default_factory):
        found = field.default_factory()
    if isinstance(found, FieldInfo):
        found = found.get_default(call_default_factory=True)
    return _NOTHING if found in (dataclasses.MISSING, PydanticUndefined) else found


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
