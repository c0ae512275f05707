"""Errors of PyTorch, CUDA, NCCL and vLLM as users see them, with the fault that each is."""

from pipeline.decide.device_faults import DeviceFault

_ASYNCHRONOUS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with "
    "`TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
_NCCL = (
    "DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, "
    "{0} (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n{1}\nLast error:\n{2}"
)
_GLOO = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:{0}] {1}. This is "
    "typically caused by a remote worker hanging or bugs in the application. Check the logs of the remote "
    "worker before reporting an error."
)
_UNHANDLED = "ncclUnhandledCudaError: Call to CUDA function failed."
_COUNTING = (
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before "
    "calling NumCudaDevices() that might have already set an error? Error "
)
_WATCHDOG = (
    "[rank1]:[E1128 12:31:07.402315 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for "
    "600021 milliseconds before timing out."
)
_TERMINATED = (
    "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID "
    "0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
)


def cuda(what: str) -> str:
    return f"AcceleratorError: CUDA error: {what}{_ASYNCHRONOUS}"


TEXTS: tuple[tuple[str, DeviceFault], ...] = (
    (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
        "of 79.15 GiB of which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.12 "
        "GiB memory in use. Of the allocated memory 75.30 GiB is allocated by PyTorch, and 1.90 GiB is "
        "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
        DeviceFault.MEMORY,
    ),
    (cuda("out of memory"), DeviceFault.MEMORY),
    ("RuntimeError: CUDA driver error: out of memory", DeviceFault.MEMORY),
    (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        DeviceFault.MEMORY,
    ),
    (
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        DeviceFault.MEMORY,
    ),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", DeviceFault.MEMORY),
    (
        "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        DeviceFault.MEMORY,
    ),
    (
        _NCCL.format("unhandled cuda error", _UNHANDLED, "Cuda failure 2 'out of memory'"),
        DeviceFault.MEMORY,
    ),
    (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing the engine (this flag also controls CPU memory reservation on the CPU backend, despite "
        "its name). See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.",
        DeviceFault.MEMORY,
    ),
    (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. "
        "Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
        DeviceFault.MEMORY,
    ),
    (
        "ValueError: To serve at least one request with the model's max seq len (32768), (4.0 GiB KV "
        "cache is needed, which is larger than the available KV cache memory (1.32 GiB). Based on the "
        "available memory, the estimated maximum model length is 10800. Try increasing "
        "`gpu_memory_utilization`",
        DeviceFault.TOO_SMALL,
    ),
    (
        "ValueError: Free memory on device cuda:0 (3.1/79.15 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 71.23 GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
        "processes.",
        DeviceFault.OTHERS,
    ),
    (cuda("no kernel image is available for execution on the device"), DeviceFault.CARD),
    ("RuntimeError: FlashAttention only supports Ampere GPUs or newer.", DeviceFault.CARD),
    (cuda("device-side assert triggered"), DeviceFault.ASSERTION),
    (
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you "
        "must use the 'spawn' start method",
        DeviceFault.FORKED,
    ),
    (cuda("initialization error"), DeviceFault.FORKED),
    (
        cuda("invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?"),
        DeviceFault.ORDINAL,
    ),
    (cuda("uncorrectable ECC error encountered"), DeviceFault.HARDWARE),
    (_TERMINATED + cuda("uncorrectable NVLink error detected during the execution"), DeviceFault.HARDWARE),
    (
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.",
        DeviceFault.HARDWARE,
    ),
    ("NVMLError_GpuIsLost: GPU is lost", DeviceFault.HARDWARE),
    ("NVMLError_LibRmVersionMismatch: Driver/library version mismatch", DeviceFault.MISMATCH),
    (
        f"{_COUNTING}803: system has unsupported display driver / cuda driver combination",
        DeviceFault.MISMATCH,
    ),
    (f"{_COUNTING}804: forward compatibility was attempted on non supported HW", DeviceFault.MISMATCH),
    (f"{_COUNTING}802: system not yet initialized", DeviceFault.FABRIC),
    (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your "
        "GPU driver by downloading and installing a new version from the URL: "
        "http://www.nvidia.com/Download/index.aspx",
        DeviceFault.DRIVER,
    ),
    (cuda("CUDA driver version is insufficient for CUDA runtime version"), DeviceFault.DRIVER),
    ("RuntimeError: No CUDA GPUs are available", DeviceFault.NO_DEVICE),
    (cuda("no CUDA-capable device is detected"), DeviceFault.NO_DEVICE),
    (
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and "
        "installed a driver from http://www.nvidia.com/Download/index.aspx",
        DeviceFault.NO_DEVICE,
    ),
    (cuda("CUDA-capable device(s) is/are busy or unavailable"), DeviceFault.BUSY),
    (
        _NCCL.format(
            "unhandled system error",
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device "
            "error.",
            "Error while creating shared memory segment /dev/shm/nccl-dbVmdK (size 9637888)",
        ),
        DeviceFault.SHARED_MEMORY,
    ),
    (cuda("an illegal memory access was encountered"), DeviceFault.ACCESS),
    (cuda("unspecified launch failure"), DeviceFault.ACCESS),
    (
        _NCCL.format(
            "unhandled system error",
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device "
            "error.",
            "socketPollConnect: connect to 10.0.0.4<41037> returned Connection refused",
        ),
        DeviceFault.NETWORK,
    ),
    (
        _NCCL.format(
            "remote process exited or there was a network error",
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
            "prematurely.",
            "socketProgress: Connection closed by remote peer gpu07<39104>",
        ),
        DeviceFault.NETWORK,
    ),
    (_GLOO.format("537", "Read error [127.0.0.1]:32682: Connection reset by peer"), DeviceFault.NETWORK),
    (_GLOO.format("544", "Connection closed by peer [10.0.0.4]:50931"), DeviceFault.NETWORK),
    (_NCCL.format("unhandled cuda error", _UNHANDLED, "Cuda failure 700 'unknown'"), DeviceFault.NCCL),
    (_WATCHDOG, DeviceFault.WATCHDOG),
    (f"{_TERMINATED}{_WATCHDOG}", DeviceFault.WATCHDOG),
    (f"{_TERMINATED}{cuda('an illegal memory access was encountered')}", DeviceFault.ACCESS),
)
PLAIN = (
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x8)",
    "KeyError: 'memory'",
    "RuntimeError: the checker ended: java.lang.OutOfMemoryError: Java heap space",
    "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1152921504606846976 bytes.",
    "ValueError: the answer is too old",
    "TimeoutError: rank 1 waited 600 s for rank 0",
)
"""Errors that are about no GPU."""
