"""Configurations of small runs, as Hydra composes them, which takes a fifth of a second each time.

Most tests change a setting or two: these are laid over what Hydra has composed once, without Hydra.
"""

import copy
import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config.choices import known_groups
from pipeline.config.compose import compose, from_mapping, to_mapping
from pipeline.config.issue import ConfigError
from pipeline.config.schema import Config
from tests.support import tiny

_SETTING = re.compile(
    r"(?!reward\.components\.|data\.environment|scheduler\.kind=)([a-z_]+(\.[a-z0-9_]+)*)=[^{$~]*"
)
"""A word that gives a key of a section another value, which is no mapping."""
_PLACE = Path("in-its-place")


class NotLaidOver(Exception):
    """A setting that only Hydra knows where to put."""


def composed_of(inputs: Path, run_dir: Path, *more: str) -> Config:
    """What ``compose(tiny.overrides(inputs, run_dir, *more))`` gives. Raises what that raises."""
    return dataclasses.replace(_composed(inputs, more), run_dir=str(run_dir))


@functools.cache
def _composed(inputs: Path, more: tuple[str, ...]) -> Config:
    settings = [word for word in more if is_setting(word)]
    chosen = tuple(word for word in more if word not in settings)
    if not any(word.startswith("run_dir=") for word in more):
        try:
            return from_mapping(_laid_over(to_mapping(_by_hydra(inputs, chosen)), settings))
        except (NotLaidOver, ConfigError):
            pass  # Hydra knows better, also what to say
    return compose(tiny.overrides(inputs, _PLACE, *more))


@functools.cache
def _by_hydra(inputs: Path, chosen: tuple[str, ...]) -> Config:
    return compose(tiny.overrides(inputs, _PLACE, *chosen))


@functools.cache
def _groups() -> frozenset[str]:
    return frozenset(known_groups(None))


def is_setting(word: str) -> bool:
    """Whether a word changes one key, and neither chooses an option nor adds or removes anything."""
    found = _SETTING.fullmatch(word)
    return found is not None and found[1] not in _groups()


def _laid_over(data: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    data = copy.deepcopy(data)
    for word in settings:
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException:
            raise NotLaidOver(word) from None
        *above, key = str(override.key_or_group).split(".")
        section: Any = data
        for name in above:
            section = section.get(name) if isinstance(section, dict) else None
        is_known = isinstance(section, dict) and key in section and not isinstance(section[key], dict)
        if not is_known or override.is_sweep_override():
            raise NotLaidOver(word)
        section[key] = override.value()
    return data
