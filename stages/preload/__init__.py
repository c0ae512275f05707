"""Modules of every task, imported once by the local scheduler's fork server, so that no task pays for it.

Importing must start no thread and touch no GPU: every task is a fork of what this leaves behind. More
modules, for tasks with models, are in :mod:`stages.preload.models`.
"""

import gc
import importlib
import os

from pipeline.config.conversion import prepare
from pipeline.config.schema import Config
from pipeline.run.commits import Record
from pipeline.run.control import Control
from pipeline.run.environment import TASK_ENVIRONMENT
from pipeline.run.identity import Identity
from pipeline.run.tasks import WORK_STAGES
from pipeline.workers.beats import Beat
from pipeline.workers.claims import ClaimFields
from pipeline.workers.handover import Instructions
from stages.process.arrow import spare_pandas

MODULES = (
    "stages.attempts.execution",
    "stages.attempts.failures",
    "stages.workers.start",
    *(f"stages.tasks.{stage}" for stage in WORK_STAGES),
    # a forked process imports the driver's main module
    "pipeline.cli.app",
)

os.environ.update(TASK_ENVIRONMENT)
for _module in MODULES:
    importlib.import_module(_module)
spare_pandas()
# half the time in which a forked worker opens its run, and a third of that until it computes
prepare(Config, Identity, Record, Beat, Control, ClaimFields, Instructions)
gc.freeze()  # what is shared stays shared: the collector would write to every object's header
