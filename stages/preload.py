"""Imported once by the local scheduler's fork server, so that no task pays for it.

Importing must start no thread and touch no GPU: every task is a fork of what this leaves behind.
"""

import contextlib
import gc
import importlib
import os

from stages.runner import prepare_environment

MODULES = (
    "deepspeed",
    "transformers",
    *(f"stages.{name}" for name in ("prepare", "rollout", "score", "reward", "update", "evaluate")),
    "stages.engines.transformers",
    # a forked process imports the driver's main module
    "pipeline.cli",
    # deepspeed imports these at its first use, which is in every update
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "torch.utils.cpp_extension",
    "setuptools.command.build_ext",
)

prepare_environment(os.environ)
os.environ.setdefault("DS_LOG_LEVEL", "ERROR")
for _module in MODULES:
    with contextlib.suppress(ImportError):  # the task that needs it says so, in its log
        importlib.import_module(_module)
gc.freeze()  # what is shared stays shared: the collector would write to every object's header
