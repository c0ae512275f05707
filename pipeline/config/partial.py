"""What is left of a configuration without what is wrong in it, so that the rest can be checked too."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.config.wording import is_missing, location_of

_FILLING: dict[str, Any] = {"model": {"policy": "/"}, "data": {"prompts": "/"}}
"""Values in place of those that have no default. Nobody sees them: what is said of a key that must be given
is that it must."""
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
