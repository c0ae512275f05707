"""vLLM's argument and configuration classes as they are on CUDA, without any: ``python -m
tests.support.pretended_vllm`` reads a list from its standard input, as JSON, of arguments of EngineArgs, each
with the model runner of the configuration, and prints what becomes of each.

The build for CPUs has the Python of the build for CUDA: of 0.32.0, 2639 files of the two wheels are equal,
all of vllm/engine and vllm/config among them, and three differ: the version's commit, where platforms look
for the version (vllm/platforms/__init__.py), and what stands for Triton's kernels on CPUs
(vllm/utils/cpu_triton_utils.py). 237 more, of kernels (vllm/third_party, vllm/vllm_flash_attn), are in the
wheel for CUDA only. A test in tests/stages/test_vllm_arguments.py compares them again. What is compiled is
left out, the card is one that is pretended, and Triton is said to be there.
"""

import json
import sys
import types
from typing import Any

GIB = 2**30


def pretend() -> None:
    """Give vLLM a platform of CUDA. Call before anything of it is imported."""
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    import vllm.platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    class Pretended(cuda.NonNvmlCudaPlatform):
        """A platform of two cards of Hopper's kind."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 * GIB

        @classmethod
        def device_count(cls) -> int:
            return 2

    vllm.platforms.current_platform = Pretended()
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = True


def made(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what vLLM makes of arguments."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor import Executor

    from stages.engines.vllm_process import own_executor

    settings = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    return {
        "device": settings.device_config.device_type,
        "model_runner": 2 if settings.use_v2_model_runner else 1,
        "async_scheduling": settings.scheduler_config.async_scheduling,
        "executor": own_executor(Executor.get_class(settings)).__name__,
        "worker": settings.parallel_config.worker_cls,
    }


def main() -> None:
    pretend()
    from stages.engines.vllm_setup import ModelRunner, choose_runner

    given = json.load(sys.stdin)
    found = []
    for arguments, runner in given:
        choose_runner(runner and ModelRunner(runner))
        try:
            found.append(made(arguments))
        except Exception as error:  # whatever vLLM says is what the test is about
            found.append({"refused": f"{type(error).__name__}: {error}"})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
