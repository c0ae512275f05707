"""PPO post-training of language models as batch jobs. ``open_run`` opens a run, to look at it in Python.

The names below are stable. Each is imported when it is asked for, so that ``import pipeline`` costs nothing.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pipeline.api.opened import MissingPackage, OpenedRun, Policy, TaskRecords, open_run
    from pipeline.metrics.samples import Choice, Damage, Sample, Samples, Turn
    from pipeline.run.commits import FileEntry, Record
    from pipeline.run.identity import RunError

__all__ = [
    "Choice",
    "Damage",
    "FileEntry",
    "MissingPackage",
    "OpenedRun",
    "Policy",
    "Record",
    "RunError",
    "Sample",
    "Samples",
    "TaskRecords",
    "Turn",
    "open_run",
]

_HOMES = {
    "pipeline.api.opened": ("MissingPackage", "OpenedRun", "Policy", "TaskRecords", "open_run"),
    "pipeline.metrics.samples": ("Choice", "Damage", "Sample", "Samples", "Turn"),
    "pipeline.run.commits": ("FileEntry", "Record"),
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
