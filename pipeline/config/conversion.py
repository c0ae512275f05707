"""Conversion of plain values, as JSON and YAML hold them, to dataclasses and back, by the fields' types.

A pydantic adapter takes long to build, and a command reads few types: each is built on first use.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import yaml
from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"

_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def converted(kind: type[T], data: object) -> T:
    """Convert ``data`` to a ``kind``. Raises pydantic's ValidationError, a ValueError."""
    return cast(T, _adapter(kind).validate_python(data))


def prepare(*kinds: type) -> None:
    """Build what converts to some types, once for all processes that are forked later."""
    for kind in kinds:
        _adapter(kind)


def plain(value: object) -> dict[str, Any]:
    """Return a dataclass as a dictionary of values that JSON holds."""
    mapping: dict[str, Any] = _adapter(type(value)).dump_python(value, mode="json")
    return mapping


def from_yaml(text: str) -> Any:
    """Parse YAML by a safe loader: libyaml's where PyYAML has it, ten times as fast as Python's."""
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def as_yaml(data: object) -> str:
    """Write plain values as YAML, in their order, by libyaml where PyYAML has it."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(data, Dumper=dumper, sort_keys=False, width=110)
    return text


def _adapter(kind: type) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        with _without_plugins():
            _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


@contextlib.contextmanager
def _without_plugins() -> Iterator[None]:
    """Have pydantic look for no plug-ins of its own: for that it reads a file of each installed package, in
    every command and worker, and on a network filesystem."""
    before = os.environ.get(_PLUGINS)
    os.environ[_PLUGINS] = "__all__"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PLUGINS]
        else:
            os.environ[_PLUGINS] = before


def in_words(error: ValidationError) -> str:
    """Describe each wrong value with its place, on one line."""
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
