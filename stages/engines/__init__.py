"""Engines by name, made once per process and configuration.

A process may run many tasks: an engine is kept until another model of the same role is asked for, so that
neither start-up nor memory is paid twice.
"""

from collections.abc import Callable, Hashable
from typing import Any

_kept: dict[str, tuple[Hashable, Any]] = {}


def engine(role: str, key: Hashable, make: Callable[[], Any]) -> Any:
    """The engine of ``role`` for ``key`` (what it was made from); the role's previous engine is dropped."""
    if role not in _kept or _kept[role][0] != key:
        _kept.pop(role, None)  # before making the new one: two may not fit
        _kept[role] = (key, make())
    return _kept[role][1]
