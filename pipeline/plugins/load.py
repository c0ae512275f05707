"""The user's own Python, named ``module:function``, or registered under a name by an installed package.

Imports nothing but the standard library: processes that only call a plug-in import it.
"""

import difflib
import importlib
import sys
from collections.abc import Callable
from typing import Any

from slurm.errors import UserError

RULES = "slurm_ppo.rules"
"""Entry point group of rules."""
ENVIRONMENTS = "slurm_ppo.environments"
"""Entry point group of environments."""
VERIFIERS = "verifiers"
"""Environment that always has a process of its own: its package handles signals, for itself."""
_KINDS = {RULES: "a rule", ENVIRONMENTS: "an environment"}


class PluginError(UserError, ValueError):
    """A plug-in cannot be used."""


class MissingImport(PluginError):
    """The plug-in exists, but imports a module that does not."""


def make_importable(folder: str) -> None:
    """Let plug-ins be imported from ``folder``, where the run was started."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def load_plugin(key: str, name: str, group: str | None = None) -> Callable[..., Any]:
    """Import ``name``, which configuration ``key`` gave.

    Args:
        group: entry point group of names without a module.

    Raises:
        PluginError: naming the key and what is missing. Whatever else the module's own code raises is
            passed on.
    """
    target = name if ":" in name or group is None else registered(key, name, group)
    module_name, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        is_own = f"{module_name}.".startswith(f"{error.name}.")
        raise (PluginError if is_own else MissingImport)(
            f"{key}={name}: {error}"
            if is_ready(target)
            else f"{key}={name}: no module {error.name!r}; modules are looked for in the folder that the run "
            "was started in and in PYTHONPATH"
        ) from error
    try:
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise PluginError(f"{key}={name}: module {module_name!r} has no {attribute!r}") from None
    if not callable(found):
        raise PluginError(f"{key}={name}: is not a function")
    function: Callable[..., Any] = found
    return function


def is_ready(target: str) -> bool:
    """Whether ``module:function`` comes with slurm-ppo, and says itself what it lacks."""
    return target.startswith("stages.")


def registered(key: str, name: str, group: str) -> str:
    """Return the ``module:function`` registered as ``name``. Raises PluginError for none, or several."""
    from importlib.metadata import entry_points  # half of what this module would import

    known = entry_points(group=group)
    values = sorted({point.value for point in known if point.name == name})
    if not values:
        names = sorted(known.names)
        close = difflib.get_close_matches(name, names, n=1)
        what = f"no installed package has {_KINDS[group]} of this name"
        raise PluginError(
            f"{key}={name}: {what}; known: {', '.join(names) or 'none'}"
            + (f" (did you mean {close[0]!r}?)" if close else "")
            + ", or write module:function"
        )
    if len(values) > 1:
        raise PluginError(f"{key}={name}: means {' and '.join(values)}; write the one that is meant")
    return values[0]
