"""Check of what deterministic kernels cost: the same update, by a process with them and by one without.

cuBLAS reads its workspace as the first matrix product is computed, so each way is a process of its own.
"""

import multiprocessing
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from pipeline.process import joined_within
from stages.models.numerics import WORKSPACE, set_up_torch
from stages.ppo.timing import timed_updates
from stages.rehearsal.allocation import half_precision
from stages.rehearsal.answers import CheckFailed, CheckInput, Shown
from stages.rehearsal.models import even_experience, policy, timed_policy
from stages.rehearsal.training import learner_of


@dataclass(frozen=True)
class Workload:
    """An update that is timed."""

    model: Callable[[Path], Path]
    """Function of a folder that makes its policy there."""
    rows: int
    prompt: int
    """Tokens of each prompt; as ``response`` of each response."""
    response: int
    warm_up: int
    """Updates before those that count."""
    rounds: int


_ON_GPU = Workload(timed_policy, 32, 256, 768, 3, 8)
_ON_CPU = Workload(policy, 8, 32, 32, 1, 1)
_SECONDS = 280.0
"""Limit of each of the two processes."""
_END_SECONDS = 5.0
_MICRO_BATCH = 8
"""Rows of a micro-batch."""
_DEAR = 1.05
"""Factor of an update's time from which deterministic kernels are worth a thought."""
_WORDS = {True: "with deterministic kernels", False: "without deterministic kernels"}
_REPORT = "report this, with this command's --json"
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
        return Shown(
            "updates compute with deterministic kernels and without; their cost on a GPU is not shown"
        )
    ratio = seconds[True] / seconds[False]
    return Shown(
        f"an update takes {ratio:.3f} times as long with deterministic kernels as without "
        f"({seconds[True]:.3f} s, {seconds[False]:.3f} s)",
        {"deterministic_ratio": ratio, "deterministic_s": seconds[True], "free_s": seconds[False]},
        _LEFT_OUT if ratio > _DEAR else "",
    )


def measured(folder: Path, is_deterministic: bool) -> float:
    """Return the median seconds of an update in a new process.

    Raises:
        RuntimeError: it failed; quotes the error.
        CheckFailed: it ended otherwise, or took too long.
    """
    context, updates = multiprocessing.get_context("spawn"), f"updates {_WORDS[is_deterministic]}"
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send_seconds, args=(writer, folder, is_deterministic), daemon=True)
    process.start()
    writer.close()
    try:
        if not reader.poll(_SECONDS):
            raise CheckFailed(f"{updates} took longer than {_SECONDS:g} s", _REPORT)
        answer = reader.recv()
    except EOFError:
        process.join(_END_SECONDS)
        raise CheckFailed(f"{updates}: their process ended with code {process.exitcode}", _REPORT) from None
    finally:
        process.kill()
        joined_within(process, _END_SECONDS)
        reader.close()
    if isinstance(answer, str):
        raise RuntimeError(f"{updates}: {answer}")
    return float(answer)


def _send_seconds(writer: Connection, folder: Path, is_deterministic: bool) -> None:
    try:
        set_up(is_deterministic)
        writer.send(seconds_of(_ON_GPU if torch.cuda.is_available() else _ON_CPU, folder))
    except Exception as error:  # whatever a library raises is what the check has found
        writer.send(f"{type(error).__name__}: {error}")


def set_up(is_deterministic: bool) -> None:
    """Set torch up as in a task, with its own workspace of cuBLAS or, as users leave it out, without."""
    os.environ.pop(WORKSPACE, None)
    if not is_deterministic:
        os.environ[WORKSPACE] = ""
    set_up_torch(num_threads=1, seed=0)
    if not torch.cuda.is_available():  # where the variable alone changes nothing
        torch.use_deterministic_algorithms(is_deterministic, warn_only=True)


def seconds_of(work: Workload, folder: Path) -> float:
    """Return the median seconds of an update in half precision."""
    length = work.prompt + work.response
    learner = learner_of(
        folder,
        f"model.policy={work.model(folder)}",
        f"model.context_length={length}",
        f"data.prompts_per_iteration={work.rows}",
        f"update.tokens_per_micro_batch={_MICRO_BATCH * length}",
        f"update.precision={half_precision()}",
        "update.zero_stage=1",
    )
    experience = even_experience(work.rows, 256, work.prompt, work.response)
    return statistics.median(timed_updates(learner, experience, work.rounds, work.warm_up))
