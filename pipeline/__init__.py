"""PPO post-training of language models as batch jobs. ``open_run`` opens a run, to look at it in Python.

The names below are stable. Each is imported when it is asked for, so that ``import pipeline`` costs nothing.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pipeline.api.opened import OpenedRun, open_run
    from pipeline.api.tables import MissingPackage
    from pipeline.api.values import Damage, Policy, RunStatus, Samples, TaskFile, TaskRecord, TaskRecords
    from pipeline.metrics.samples import Choice, Sample, Turn
    from pipeline.run.identity import RunError

__all__ = [
    "Choice",
    "Damage",
    "MissingPackage",
    "OpenedRun",
    "Policy",
    "RunError",
    "RunStatus",
    "Sample",
    "Samples",
    "TaskFile",
    "TaskRecord",
    "TaskRecords",
    "Turn",
    "open_run",
]

_HOMES = {
    "pipeline.api.opened": ("OpenedRun", "open_run"),
    "pipeline.api.tables": ("MissingPackage",),
    "pipeline.api.values": (
        "Damage",
        "Policy",
        "RunStatus",
        "Samples",
        "TaskFile",
        "TaskRecord",
        "TaskRecords",
    ),
    "pipeline.metrics.samples": ("Choice", "Sample", "Turn"),
    "pipeline.run.directory": ("RunError",),
}
"""Names by the module that defines them."""


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
