"""Modules imported once, as in :mod:`stages.preload`, for runs that use vLLM (ten seconds and more)."""

import contextlib
import gc
import importlib

from stages.engines.vllm_setup import be_quiet

be_quiet()
for _module in ("vllm.engine.arg_utils", "vllm.v1.engine.llm_engine", "vllm.v1.executor.uniproc_executor"):
    with contextlib.suppress(ImportError):  # the task that needs it says so, in its log
        importlib.import_module(_module)
gc.freeze()
