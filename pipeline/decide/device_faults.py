"""What errors of GPUs, drivers, NCCL and gloo mean, whether another try helps, and what to change. Pure.

:data:`FAULTS` is the one table. An error is looked up by its type and message, and one of a process that
aborted by the end of its log. The first row that matches counts, so that a cause, as NCCL's "last error"
names it, comes before the error that was made of it.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from pipeline.run.failures import FailureKind
from pipeline.run.tasks import Stage


class DeviceFault(StrEnum):
    """What is wrong."""

    MEMORY = "memory"
    TOO_SMALL = "too_small"
    CARD = "card"
    ASSERTION = "assertion"
    FORKED = "forked"
    ORDINAL = "ordinal"
    HARDWARE = "hardware"
    MISMATCH = "mismatch"
    DRIVER = "driver"
    FABRIC = "fabric"
    NO_DEVICE = "no_device"
    BUSY = "busy"
    OTHERS = "others"
    SHARED_MEMORY = "shared_memory"
    ACCESS = "access"
    NETWORK = "network"
    NCCL = "nccl"
    WATCHDOG = "watchdog"


class Helps(StrEnum):
    """What helps against a fault, beside a change."""

    SMALLER = "a try with half of the batch budget"
    ANYWHERE = "another try"
    ELSEWHERE = "another try on another node"
    NOTHING = "no other try"


@dataclass(frozen=True)
class FaultRow:
    """What is known of a fault."""

    fault: DeviceFault
    helps: Helps
    texts: str
    """Regular expression of what errors and logs say."""
    meaning: str
    change: str
    """What to change; ``STAGE`` stands for the stage's section."""


FAULTS = (
    FaultRow(
        DeviceFault.TOO_SMALL,
        Helps.NOTHING,
        r"To serve at least one request with the model'?s'?s? max seq len",
        "the memory that vLLM may take holds the key-value cache of not even one longest sequence",
        "raise STAGE.vllm.gpu_memory_utilization, lower STAGE.vllm.max_model_len, or split the model "
        "(STAGE.vllm.tensor_parallel_size)",
    ),
    FaultRow(
        DeviceFault.OTHERS,
        Helps.ANYWHERE,
        r"Free memory on device .* is less than",
        "another process has taken memory of the GPU that vLLM wants for itself",
        "give each task GPUs of its own (scheduler.STAGE.gpus_per_node, on one machine "
        "scheduler.slots=1), or lower STAGE.vllm.gpu_memory_utilization",
    ),
    FaultRow(
        DeviceFault.MEMORY,
        Helps.SMALLER,
        r"(CUDA|HIP) out of memory|CUDA (driver )?error: out of memory"
        r"|(^|[^\w.])(torch\.(cuda\.)?)?OutOfMemoryError"
        r"|CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_ALLOC_FAILED"
        r"|CUDNN_STATUS_\w*ALLOCATION_FAILED|Cuda failure (\d+ )?'out of memory'"
        r"|No available memory for the cache blocks",
        "the GPU's memory did not suffice",
        "lower STAGE.tokens_per_batch, with vLLM STAGE.vllm.max_num_seqs or gpu_memory_utilization",
    ),
    FaultRow(
        DeviceFault.CARD,
        Helps.NOTHING,
        r"no kernel image is available for execution on the device|FlashAttention only supports Ampere"
        r"|Cuda failure (\d+ )?'no kernel image",
        "this build of torch, or of a library beside it, has no code for this kind of GPU",
        "choose another kind of GPU (scheduler.STAGE.partition, constraint or gpus_per_node=TYPE:COUNT), or "
        "install a build for this one",
    ),
    FaultRow(
        DeviceFault.ASSERTION,
        Helps.NOTHING,
        r"device-side assert triggered",
        "a check in a GPU kernel failed, mostly an index such as a token id that is out of range; the same "
        "inputs fail again",
        "compare model and tokenizer (slurm-ppo validate), or run the task once with CUDA_LAUNCH_BLOCKING=1, "
        "by which the traceback names the place",
    ),
    FaultRow(
        DeviceFault.FORKED,
        Helps.NOTHING,
        r"Cannot re-initialize CUDA in forked subprocess|CUDA error: initialization error",
        "the process was forked from one that had used the GPU",
        "have no module use CUDA when it is imported: a rule, engine or scheduler of yours, or sitecustomize",
    ),
    FaultRow(
        DeviceFault.ORDINAL,
        Helps.NOTHING,
        r"CUDA error: invalid device ordinal|Cuda failure (\d+ )?'invalid device ordinal'",
        "a process asks for a GPU beyond those that it was given",
        "give as many GPUs as processes (scheduler.STAGE.ntasks_per_node, scheduler.STAGE.gpus_per_node, "
        "vLLM's tensor_parallel_size)",
    ),
    FaultRow(
        DeviceFault.HARDWARE,
        Helps.ELSEWHERE,
        r"uncorrectable (NVLink |ECC )*error (was )?(encountered|detected)|ECC error encountered"
        r"|fallen off the bus|GPU is lost|NVRM: Xid|hardware stack error|CUDA error: unknown error",
        "the GPU is broken, or needs a reset",
        "report it to the cluster's administrators; scheduler.STAGE.exclude leaves its node out",
    ),
    FaultRow(
        DeviceFault.MISMATCH,
        Helps.ELSEWHERE,
        r"Driver/library version mismatch|Error 80[34]:"
        r"|unsupported display driver / cuda driver combination"
        r"|forward compatibility was attempted on non supported HW",
        "the parts of the node's driver, or the driver and the container's CUDA, do not belong together",
        "have the node restarted after its driver's upgrade, or take an image without its own libcuda; "
        "scheduler.STAGE.exclude leaves the node out",
    ),
    FaultRow(
        DeviceFault.DRIVER,
        Helps.ELSEWHERE,
        r"The NVIDIA driver on your system is too old"
        r"|CUDA driver version is insufficient for CUDA runtime version",
        "the node's driver is older than this build of torch needs",
        "install torch for an older CUDA, or choose nodes with a newer driver (scheduler.STAGE.partition, "
        "constraint, exclude)",
    ),
    FaultRow(
        DeviceFault.FABRIC,
        Helps.ELSEWHERE,
        r"Error 802:|CUDA error: system not yet initialized",
        "the node's fabric manager, which connects its GPUs, does not run",
        "report it to the cluster's administrators; scheduler.STAGE.exclude leaves its node out",
    ),
    FaultRow(
        DeviceFault.NO_DEVICE,
        Helps.ELSEWHERE,
        r"no CUDA-capable device is detected|No CUDA GPUs are available|Found no NVIDIA driver on your "
        r"system",
        "the task sees no GPU",
        "ask for one (scheduler.STAGE.gpus_per_node), and let a container have it (apptainer exec --nv)",
    ),
    FaultRow(
        DeviceFault.BUSY,
        Helps.ELSEWHERE,
        r"CUDA-capable device\(s\) is/are busy or unavailable",
        "another process has the GPU for itself",
        "give each task GPUs of its own (scheduler.STAGE.gpus_per_node), or have the GPU's compute mode set "
        "to default",
    ),
    FaultRow(
        DeviceFault.SHARED_MEMORY,
        Helps.NOTHING,
        r"Error while creating shared memory segment /dev/shm/nccl",
        "/dev/shm is too small for what the ranks of a node exchange",
        "enlarge /dev/shm (a container's --shm-size), or set NCCL_SHM_DISABLE=1 in scheduler.environment",
    ),
    FaultRow(
        DeviceFault.ACCESS,
        Helps.ANYWHERE,
        r"an illegal memory access was encountered|CUDA error: (misaligned address|an illegal instruction)"
        r"|unspecified launch failure|CUBLAS_STATUS_EXECUTION_FAILED|CUDNN_STATUS_EXECUTION_FAILED",
        "a GPU kernel used memory that is not its own: a defect of a kernel, or of the GPU",
        "if it comes again, run the task once with CUDA_LAUNCH_BLOCKING=1, by which the traceback names the "
        "place, or leave its node out (scheduler.STAGE.exclude)",
    ),
    FaultRow(
        DeviceFault.NETWORK,
        Helps.ANYWHERE,
        r"ncclSystemError|ncclRemoteError|unhandled system error|NCCL error.*remote process exited"
        r"|gloo/transport/tcp/.*(Connection (closed|reset) by peer|Broken pipe)",
        "ranks lost their connection, mostly as another one had ended",
        "look at the other ranks' logs; where none failed, name the interface (NCCL_SOCKET_IFNAME, "
        "NCCL_IB_DISABLE=1 in scheduler.environment)",
    ),
    FaultRow(
        DeviceFault.NCCL,
        Helps.ANYWHERE,
        r"ncclUnhandledCudaError|ncclInternalError|unhandled cuda error",
        "NCCL, which connects the ranks, failed in a call of CUDA",
        "set NCCL_DEBUG=INFO in scheduler.environment, by which the log names the call",
    ),
    FaultRow(
        DeviceFault.WATCHDOG,
        Helps.ANYWHERE,
        r"Watchdog caught collective operation timeout|watchdog thread terminated with exception"
        r"|watchdog got stuck",
        "a rank waited in vain for another, and NCCL's watchdog ended it",
        "look at the other ranks' logs: one hangs, is much slower, or has ended",
    ),
)


@dataclass(frozen=True)
class Diagnosis:
    """A fault that was found in an error or a log."""

    row: FaultRow
    line: str
    """The line that says so."""

    def kind(self, stage: Stage) -> FailureKind:
        """Return the kind of failure that it is in a stage. Of an update that lacked memory
        :mod:`stages.ppo.memory` knows more."""
        if self.row.helps is Helps.SMALLER and stage not in HALVING:
            return FailureKind.ERROR
        return _KINDS[self.row.helps]

    def in_words(self, stage: Stage) -> str:
        """Return one line: what it means, what was said, what follows, what to change."""
        kind, resources = self.kind(stage), _RESOURCES.get(stage, str(stage))
        change = self.row.change.replace("scheduler.STAGE.", f"scheduler.{resources}.")
        change = change.replace("STAGE.", f"{_SECTIONS.get(stage, str(stage))}.")
        if kind is FailureKind.ERROR and self.row.fault is DeviceFault.MEMORY:
            change = "lower update.tokens_per_micro_batch"
        return f"{self.row.meaning} ({self.line}); {_AFTER[kind]}{change}"


HALVING = frozenset({Stage.PREPARE, Stage.ROLLOUT, Stage.SCORE, Stage.REWARD, Stage.EVALUATE})
"""Stages whose batch budget is halved for the next try (:mod:`pipeline.decide.budgets`)."""
_SECTIONS = {Stage.PREPARE: "reward", Stage.SCORE: "reward", Stage.EVALUATE: "rollout"}
"""Sections of the engines of stages that are named otherwise."""
_RESOURCES = {Stage.SCORE: "reward"}
"""Sections of the scheduler likewise."""
_KINDS = {
    Helps.SMALLER: FailureKind.DEVICE_MEMORY,
    Helps.ANYWHERE: FailureKind.ERROR,
    Helps.ELSEWHERE: FailureKind.DEVICE,
    Helps.NOTHING: FailureKind.CONFIG,
}
_AFTER = {
    FailureKind.DEVICE_MEMORY: "the next try has half of the batch budget; to save the first: ",
    FailureKind.ERROR: "",
    FailureKind.DEVICE: "the next try is on another node, where there is one; ",
    FailureKind.CONFIG: "another try would not help: ",
}
LOG_LINES = 200
"""Lines at the end of a log in which the fault of a process that aborted is looked for."""
_LONGEST_LINE = 300


def diagnose(text: str) -> Diagnosis | None:
    """Return the fault that an error or the end of a log is about; None where it is about none.

    Args:
        text: types and messages of an error and its causes, or lines of a log.
    """
    for row, pattern in _PATTERNS:
        if found := pattern.search(text):
            start = text.rfind("\n", 0, found.start()) + 1
            line = text[start:].partition("\n")[0].strip()
            return Diagnosis(row, line[:_LONGEST_LINE])
    return None


_PATTERNS = [(row, re.compile(row.texts)) for row in FAULTS]
