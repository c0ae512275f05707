"""Values that a process keeps from task to task, with its engines (:mod:`stages.engines.kept`)."""

from collections.abc import Callable
from typing import Any

_values: dict[str, tuple[Any, Any, Callable[[Any], None]]] = {}
"""Keys, values, and what gives back what a value holds."""


def _holds_nothing(value: Any) -> None:
    """Give back nothing: a value that is garbage when it is dropped."""


def kept_value(
    name: str, key: Any, make: Callable[[], Any], close: Callable[[Any], None] = _holds_nothing
) -> Any:
    """Return something small that no use changes: what is kept under ``name`` if it was made from ``key``.

    Args:
        close: gives back what a value holds that is not only memory, when it is dropped.
    """
    if name not in _values or _values[name][0] != key:
        drop_value(name)
        _values[name] = (key, make(), close)
    return _values[name][1]


def drop_value(name: str) -> None:
    """Drop what is kept under ``name``, if anything is."""
    if name in _values:
        _, value, close = _values.pop(name)
        close(value)


def kept_names() -> list[str]:
    """Return the names under which something is kept."""
    return list(_values)
