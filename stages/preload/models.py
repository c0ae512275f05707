"""Modules imported once, as in :mod:`stages.preload`, for runs with models of transformers and DeepSpeed."""

import contextlib
import gc
import importlib
import os

from stages.models.numerics import import_deepspeed

MODULES = (
    "deepspeed",
    "transformers",
    "transformers.models.auto.tokenization_auto",
    "stages.engines.transformers",
    "stages.engines.deepspeed",
    "stages.tasks.reward",
    # deepspeed imports these at its first use, which is in every update
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "torch.utils.cpp_extension",
    "setuptools.command.build_ext",
)

os.environ.setdefault("DS_LOG_LEVEL", "ERROR")
with contextlib.suppress(ImportError):
    import_deepspeed()
for _module in MODULES:
    with contextlib.suppress(ImportError):  # the task that needs it says so, in its log
        importlib.import_module(_module)
gc.freeze()
