"""Imported once by the local scheduler's fork server, so that no task pays for it.

Importing must start no thread and touch no GPU: every task is a fork of what this leaves behind.
"""

import contextlib
import gc
import importlib
import os

from pipeline.environment import TASK_ENVIRONMENT

os.environ.update(TASK_ENVIRONMENT)
os.environ.setdefault("DS_LOG_LEVEL", "ERROR")
if not os.path.exists("/dev/nvidia0"):  # noqa: PTH110 - asks the machine, not torch, which would wake the driver
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: F401
import transformers  # noqa: F401

import stages.engines.transformers
import stages.evaluate
import stages.prepare
import stages.reward
import stages.rollout
import stages.runner
import stages.update  # noqa: F401

for _late in (
    # a forked process imports the driver's main module
    "pipeline.cli",
    # deepspeed imports these at its first use, which is in every update
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "torch.utils.cpp_extension",
    "setuptools.command.build_ext",
):
    with contextlib.suppress(ImportError):  # of another version: then a task imports what it needs itself
        importlib.import_module(_late)

gc.freeze()  # what is shared stays shared: the collector would write to every object's header
