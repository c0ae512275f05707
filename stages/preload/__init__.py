"""Modules of every task, imported once by the local scheduler's fork server, so that no task pays for it.

Importing must start no thread and touch no GPU: every task is a fork of what this leaves behind. More
modules, for tasks with models, are in :mod:`stages.preload.models`.
"""

import gc
import importlib
import os

from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.tasks import WORK_STAGES

MODULES = (
    "stages.attempts.execution",
    "stages.attempts.failures",
    "stages.workers.loop",
    *(f"stages.tasks.{stage}" for stage in WORK_STAGES),
    # a forked process imports the driver's main module
    "pipeline.cli.app",
)

os.environ.update(TASK_ENVIRONMENT)
for _module in MODULES:
    importlib.import_module(_module)
gc.freeze()  # what is shared stays shared: the collector would write to every object's header
