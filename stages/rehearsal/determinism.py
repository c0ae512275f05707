"""Check of what deterministic kernels cost: the same update, by a process with them and by one without.

cuBLAS reads its workspace as the first matrix product is computed, so each way is a process of its own.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from pipeline.process import joined_within
from stages.models.devices import device
from stages.models.numerics import WORKSPACE, set_up_torch
from stages.rehearsal.allocation import half_precision
from stages.rehearsal.answers import CheckFailed, CheckInput, Shown
from stages.rehearsal.models import even_experience, policy, timed_policy
from stages.rehearsal.training import learner_of, update_of

_ROWS, _PROMPT, _RESPONSE = 32, 256, 768
_WARM_UP, _ROUNDS = 3, 8
_SECONDS = 280.0
"""Limit of each of the two processes."""
_END_SECONDS = 5.0
_DEAR = 1.05
"""Factor of an update's time from which deterministic kernels are worth a thought."""
_WORDS = {True: "with deterministic kernels", False: "without deterministic kernels"}
_LEFT_OUT = (
    f"scheduler.update.environment.{WORKSPACE}='' leaves deterministic kernels out: the same update may then "
    "differ in its last digits (docs/explanation/devices.md)"
)


def cost(given: CheckInput) -> Shown:
    """Time an update with deterministic kernels, and without."""
    seconds = {way: measured(given.folder, way) for way in (True, False)}
    return judged(seconds, torch.cuda.is_available())


def judged(seconds: Mapping[bool, float], is_gpu: bool) -> Shown:
    """Judge the seconds of an update by whether kernels were deterministic. Pure."""
    if not is_gpu:
        return Shown("updates compute with deterministic kernels and without; what a GPU's cost is not shown")
    ratio = seconds[True] / seconds[False]
    return Shown(
        f"an update takes {ratio:.3f} times as long with deterministic kernels as without "
        f"({seconds[True]:.3f} s, {seconds[False]:.3f} s)",
        {"deterministic_ratio": ratio, "deterministic_s": seconds[True], "free_s": seconds[False]},
        _LEFT_OUT if ratio > _DEAR else "",
    )


def measured(folder: Path, is_deterministic: bool) -> float:
    """Return the seconds of an update in a new process. Raises CheckFailed where that ends without them."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send_seconds, args=(writer, folder, is_deterministic), daemon=True)
    process.start()
    writer.close()
    try:
        if not reader.poll(_SECONDS):
            raise CheckFailed(f"updates {_WORDS[is_deterministic]} took over {_SECONDS:g} s", "see its log")
        return float(reader.recv())
    except EOFError:
        process.join(_END_SECONDS)
        ended = f"a process that updates {_WORDS[is_deterministic]} ended with code {process.exitcode}"
        raise CheckFailed(ended, "see its log") from None
    finally:
        process.kill()
        joined_within(process, _END_SECONDS)
        reader.close()


def _send_seconds(writer: Connection, folder: Path, is_deterministic: bool) -> None:
    if not is_deterministic:
        os.environ[WORKSPACE] = ""
    else:
        os.environ.pop(WORKSPACE, None)
    set_up_torch(num_threads=1, seed=0)
    if not torch.cuda.is_available():  # on CPUs the variable alone changes nothing
        torch.use_deterministic_algorithms(is_deterministic, warn_only=True)
    assert torch.are_deterministic_algorithms_enabled() is is_deterministic
    writer.send(timed_on_gpu(folder) if device().type == "cuda" else timed_on_cpu(folder))


def timed_on_gpu(folder: Path) -> float:
    """Return the median seconds of an update large enough for a GPU."""
    length = _PROMPT + _RESPONSE
    learner = learner_of(
        folder,
        f"model.policy={timed_policy(folder)}",
        f"model.context_length={length}",
        f"data.prompts_per_iteration={_ROWS}",
        f"update.tokens_per_micro_batch={8 * length}",
        f"update.precision={half_precision()}",
        "update.zero_stage=1",
    )
    experience, taken = even_experience(_ROWS, 256, _PROMPT, _RESPONSE), []
    for iteration in range(1, _WARM_UP + _ROUNDS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        update_of(learner, iteration, experience)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[_WARM_UP:])


def timed_on_cpu(folder: Path) -> float:
    """Return the seconds of an update of a tiny policy."""
    policy(folder)
    learner = learner_of(folder, "update.zero_stage=0")
    began = time.perf_counter()
    update_of(learner)
    return time.perf_counter() - began
