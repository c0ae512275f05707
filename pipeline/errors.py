"""Errors that are the user's to mend: shown as one message, without a traceback."""

import sys


def user_errors() -> tuple[type[Exception], ...]:
    """The named exceptions of the modules that have been imported; the others cannot have been raised."""
    names = (
        ("pipeline.compose", "ConfigError"),
        ("pipeline.runs", "RunError"),
        ("pipeline.lease", "LeaseHeld"),
        ("pipeline.lease", "LeaseLost"),
        ("pipeline.data", "PromptError"),
        ("pipeline.plugins", "PluginError"),
        ("slurm.submission", "Refused"),
        ("slurm.commands", "SlurmMissing"),
        ("slurm.devcluster", "DevclusterError"),
    )
    return _imported(names)


def scheduler_errors() -> tuple[type[Exception], ...]:
    """Slurm's own troubles: nothing is lost, and later it may answer."""
    return _imported((("slurm.commands", "SlurmError"), ("slurm.states", "UnknownState")))


def _imported(names: tuple[tuple[str, str], ...]) -> tuple[type[Exception], ...]:
    return tuple(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)
