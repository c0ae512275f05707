"""Start of vLLM: the environment that it reads, its arguments, what it compiles and what it refuses."""

import functools
import importlib.metadata
import os
import re
import signal
import sys
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from pipeline.config.engines import ModelRunner, VllmConfig
from pipeline.config.schema import Config
from pipeline.decide.device_faults import diagnose
from pipeline.process import uninterrupted
from stages.context import UserError
from stages.engines.compiled import KeptCache, private_cache

_PLACES = frozenset(
    {
        "VLLM_CACHE_ROOT",
        "TORCHINDUCTOR_CACHE_DIR",
        "VLLM_DIST_IDENT",
        "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
    }
)
"""Variables that only say where things are."""
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_WARNINGS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""Signals to all processes of a job that the task answers: vLLM's own processes are started deaf to them."""
_REFUSAL = re.compile(
    r"architecture.*support|support.*architecture|no valid attention backend|support.*head_?(dim|size)|"
    r"head_?(dim|size).*support|not support lora",
    re.IGNORECASE,
)


class Unsupported(UserError):
    """vLLM does not know the model, or not for the use at hand, or has no kernel for its shape."""


def is_refusal(text: str) -> bool:
    """Whether vLLM says that it has no code for this model, in one of the wordings of its parts."""
    return _REFUSAL.search(text) is not None


def be_quiet() -> None:
    """Let vLLM log errors only, unless the user's environment asks for more. Call before importing it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def set_up(given: VllmConfig) -> None:
    """Set the variables that vLLM reads from the environment, most of them while it is imported."""
    be_quiet()
    os.environ |= {
        # Where the engine runs is said when it is made (_started). With 1 a model on a CPU would get two
        # processes, the engine's and one for the model.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",  # all its workers are on this node
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
        # Threads are the stage's num_threads. Left to itself, every task would bind to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        # Its files are pickles named by the model's path, which is another for every policy.
        "VLLM_USE_AOT_COMPILE": "0",
    }
    choose_runner(given.model_runner)
    # FlashInfer's sampler takes no request that has a seed, as all of ours have; still, each engine would
    # import it and try whether it can be compiled here, where there may be no compiler.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # A port given to all tasks of a node would be fought for; without, each takes a free one.
    os.environ.pop("VLLM_PORT", None)
    # Memory that is about to be written need not be filled.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Even eager engines compile a helper, in 20 s on a CPU, for nothing that a short stage would notice.
    torch._dynamo.config.disable = given.enforce_eager
    os.environ["TORCH_COMPILE_DISABLE"] = str(int(given.enforce_eager))  # for workers of their own


def choose_runner(chosen: ModelRunner | None) -> None:
    """Set vLLM's model runner, or leave it to the user's environment, and else to vLLM."""
    users = _users_runner()
    if chosen is not None:
        os.environ[_RUNNER] = "1" if chosen is ModelRunner.V2 else "0"
    elif users is not None:
        os.environ[_RUNNER] = users
    else:
        os.environ.pop(_RUNNER, None)


@functools.cache
def _users_runner() -> str | None:
    """Return what the environment says before this process has set it."""
    return os.environ.get(_RUNNER)


def has_own_process(given: VllmConfig) -> bool:
    """Whether vLLM's engine gets a process of its own, beside the task's."""
    return torch.cuda.is_available() if given.own_process is None else given.own_process


def cache_key(arguments: Mapping[str, Any]) -> str:
    """Return all that compiled code depends on: versions, settings, environment, processor, model shape."""
    text = (Path(arguments["model"]) / "config.json").read_text()
    others = sorted((name, str(value)) for name, value in arguments.items() if name != "model")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    processor = torch.backends.cpu.get_cpu_capability()
    versions = [torch.__version__, vllm_version(), sys.version]
    runner = os.environ.get(_RUNNER)
    return repr([text, others, device, processor, versions, _environment(), runner])


@functools.cache
def _environment() -> dict[str, str]:
    """Return the variables that vLLM and torch read, as they were at the first start in this process: vLLM
    adds some of its own when it is imported."""
    names = [name for name in os.environ if name.startswith(("VLLM_", "TORCH")) and name not in _PLACES]
    return {name: os.environ[name] for name in sorted(names)}


def vllm_version() -> str:
    """Return the installed package and its version. Raises UserError when neither is installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise UserError("engine=vllm: vLLM is not installed; install slurm-ppo[vllm], or see docs/howto/vllm.md")


@dataclass(frozen=True)
class StartedVllm:
    """An engine of vLLM, and what it has of this node."""

    engine: Any
    kept: KeptCache
    """Cache of what it compiles."""
    note: Path | None
    """File in which its own process notes what goes wrong in it; None: it has no process of its own."""

    def errors(self) -> AbstractContextManager[None]:
        """Raise, in the block, what goes wrong in the engine's own process as if it did so here."""
        if self.note is None:
            return nullcontext()
        from stages.engines.vllm_process import as_here

        return as_here(self.note)


def start(stage: str, config: Config, arguments: dict[str, Any]) -> StartedVllm:
    """Start an engine.

    Raises:
        UserError: vLLM is not installed, or refuses the configuration.
        Unsupported: it does not know the model.
    """
    given = (config.rollout if stage == "rollout" else config.reward).vllm
    set_up(given)
    kept = private_cache(Path(config.run_dir), cache_key(arguments), given.keep_compiled)
    os.environ |= kept.variables
    arguments = arguments | {"compilation_config": {"cache_dir": str(kept.folder / "graphs")}}
    note = kept.folder.parent / "error.json" if has_own_process(given) else None
    try:
        with uninterrupted(_WARNINGS):
            return StartedVllm(_started(stage, arguments, note), kept, note)
    except BaseException:
        kept.discard()
        raise


def _started(stage: str, arguments: dict[str, Any], note: Path | None) -> Any:
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise UserError(
            f"{stage}.engine=vllm: vLLM cannot be imported ({error}); install slurm-ppo[vllm] on GPU nodes, "
            "or vllm-cpu as docs/howto/vllm.md says, or take engine=transformers"
        ) from error
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        # The defaults of vLLM's own offline class: others take small steps.
        given, usage = EngineArgs(**arguments), UsageContext.LLM_CLASS
        return LLMEngine.from_engine_args(given, usage) if note is None else _in_process(given, usage, note)
    except (ValueError, RuntimeError) as error:
        raise _explained(stage, error) from error
    finally:
        torch.set_num_threads = set_num_threads  # vLLM's worker puts a function there that does nothing
        torch.set_num_threads(threads)


def _in_process(given: Any, usage: Any, note: Path) -> Any:
    """Start an engine in a process of its own."""
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    from stages.engines.vllm_process import NOTE, answer_when_ended, as_here, own_executor

    os.environ[NOTE] = str(note)
    with as_here(note):
        settings = given.create_engine_config(usage)
        executor = own_executor(Executor.get_class(settings))
        engine = LLMEngine(settings, executor, log_stats=False, usage_context=usage, multiprocess_mode=True)
    answer_when_ended(engine.engine_core)
    return engine


def _explained(stage: str, error: ValueError | RuntimeError) -> Exception:
    """Return the error of a start in the words of the configuration, if it is of that."""
    text = " ".join(str(error).split())
    if is_refusal(text):
        return Unsupported(f"{stage}.engine=vllm: {text}; take engine=transformers for it")
    if isinstance(error, RuntimeError) or diagnose(text):
        return error
    return UserError(f"{stage}.engine=vllm: vLLM refuses to start: {text}; see {stage}.vllm")
