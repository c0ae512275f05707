"""Conversion of plain values, as JSON and YAML hold them, to dataclasses and back, by the fields' types.

A pydantic adapter takes long to build, and a command reads few types: each is built on first use.
"""

from typing import Any, TypeVar, cast

import yaml
from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def converted(kind: type[T], data: object) -> T:
    """Convert ``data`` to a ``kind``. Raises pydantic's ValidationError, a ValueError."""
    return cast(T, _adapter(kind).validate_python(data))


def plain(value: object) -> dict[str, Any]:
    """Return a dataclass as a dictionary of values that JSON holds."""
    mapping: dict[str, Any] = _adapter(type(value)).dump_python(value, mode="json")
    return mapping


def from_yaml(text: str) -> Any:
    """Parse YAML by a safe loader: libyaml's where PyYAML has it, ten times as fast as Python's."""
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _adapter(kind: type) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def in_words(error: ValidationError) -> str:
    """Describe each wrong value with its place, on one line."""
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
