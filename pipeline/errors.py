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
        ("pipeline.sync", "NoKey"),
        ("pipeline.dashboardpush", "NoProject"),
        ("slurm.submission", "Refused"),
        ("slurm.commands", "SlurmMissing"),
        ("slurm.devcluster", "DevclusterError"),
    )
    return _imported(names)


def service_errors() -> tuple[type[Exception], ...]:
    """Slurm's or W&B's own troubles: nothing is lost, and later they may answer."""
    names = (
        ("slurm.commands", "SlurmError"),
        ("slurm.states", "UnknownState"),
        ("pipeline.sync", "SyncFailed"),
        ("pipeline.dashboardpush", "PushFailed"),
    )
    return _imported(names)


def _imported(names: tuple[tuple[str, str], ...]) -> tuple[type[Exception], ...]:
    return tuple(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)
