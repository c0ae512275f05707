"""The user's own Python, named ``module:function``."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from pipeline.config import Config, RuleConfig


class PluginError(ValueError):
    """A plug-in cannot be imported."""


def make_importable(folder: str) -> None:
    """Let plug-ins be imported from ``folder``, where the run was started."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def load_plugin(key: str, name: str) -> Callable[..., Any]:
    """Import ``name``, which configuration ``key`` gave.

    Raises:
        PluginError: naming the key and what is missing. Whatever else the module's own code raises is
            passed on.
    """
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise PluginError(
            f"{key}={name}: no module {error.name!r}; modules are looked for in the folder that the run "
            "was started in and in PYTHONPATH"
        ) from error
    except AttributeError:
        raise PluginError(f"{key}={name}: module {module_name!r} has no {attribute!r}") from None
    if not callable(found):
        raise PluginError(f"{key}={name}: is not a function")
    function: Callable[..., Any] = found
    return function


def load_rules(config: Config) -> None:
    """Import every rule of the configuration, so that a wrong name shows now. Raises PluginError."""
    for name, component in config.reward.components.items():
        if isinstance(component, RuleConfig):
            load_plugin(f"reward.components.{name}.function", component.function)
