"""Environment variables that every process of slurm-ppo gets, and the pipe by which
tasks notify their parent (:mod:`stages.process.parent`).
"""

from slurm.tasklist import COMMITTED as COMMITTED
from slurm.tasklist import PARENT_PIPE as PARENT_PIPE
from slurm.tasklist import RELEASED as RELEASED

FAILED, WAITS = b"f", b"w"
"""What a worker says to the driver on this machine besides: an attempt has failed; it has nothing to do."""

TASK_ENVIRONMENT = {
    # Compute nodes have no internet: whatever would ask for it must fail at once instead of waiting.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    # Tasks are forked after the tokenizers library was imported.
    "TOKENIZERS_PARALLELISM": "false",
    # Asking whether there is a GPU must not open the driver in the server that tasks are forked from.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Waiting threads spin for about 0.1 ms (GNU's OpenMP), then sleep. A micro-batch of a small model
    # makes threads wait 300 times, mostly shorter than that, and waking one up takes as long. Those that spin
    # for milliseconds, as is the default, made an update of 2 threads take 2.3 to 10 s, instead of 3.0 s, on
    # two cores that others used too.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "3000",
}
"""Variables by name; to be set before torch is imported."""
