"""Processes that are the ranks of an update."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.run.commits import Record, read_record
from pipeline.run.directory import Run
from pipeline.run.tasks import Stage, Task
from tests.support import ROOT, processes
from tests.support.processes import Done, fork_server, stage_arguments
from tests.support.trainers import whole_state

_OF_SOME = ("replay/", "seconds/state/")
"""What begins the names of metrics that not every update has."""
TIMING = ("compute_seconds", "startup_seconds", "peak_memory_gib", "seconds/", *_OF_SOME)
"""What begins the names of metrics that no two updates have in common."""


def place_of(rank: int, size: int, rendezvous: Path) -> dict[str, str]:
    """What a launcher sets."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "RENDEZVOUS_FILE": str(rendezvous),
    }


def as_rank(environment: Mapping[str, str], function: Callable[..., None], *arguments: object) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    function(*arguments)


def start_ranks(size: int, rendezvous: Path, function: Callable[..., None], *arguments: object) -> list:
    """Call ``function(*arguments, rank)`` in a fork per rank."""
    started = []
    for rank in range(size):
        given = (place_of(rank, size, rendezvous), function, *arguments, rank)
        started.append(fork_server().Process(target=as_rank, args=given))
        started[-1].start()
    return started


def ended(started: list, limit: float = 120) -> list[int | None]:
    """Exit codes; each has so many seconds."""
    for process in started:
        process.join(timeout=limit)
    return [process.exitcode for process in started]


def run_command(arguments: list[str], folder: Path, rank: int) -> None:
    processes._main(arguments, str(folder / f"rank-{rank}.log"), str(ROOT))


def update_stage(run: Run, size: int, iteration: int = 1) -> list[Done]:
    """The update by so many ranks, to its end."""
    root = run.paths.root
    given = stage_arguments(run, "update", iteration)
    given += ["--attempt", f"by-{size}", "--failure-file", str(root / "failure.json")]
    codes = ended(start_ranks(size, root / "meeting" / "file", run_command, given, root))
    return [Done(code, (root / f"rank-{rank}.log").read_text()) for rank, code in enumerate(codes)]


def updated(run: Run, size: int, iteration: int = 1) -> Record:
    done = update_stage(run, size, iteration)
    assert [one.code for one in done] == [0] * size, "\n".join(one.log for one in done)
    assert ["committed" in one.log for one in done] == [True] + [False] * (size - 1)
    assert not any((run.paths.root / "meeting").glob("*"))
    record = read_record(run.paths, Task(iteration, Stage.UPDATE))
    assert record is not None
    return record


def state_directory(run: Run, version: int) -> Path:
    state = read_record(run.paths, Task(version, Stage.STATE))
    assert state is not None
    return run.paths.root / state.outputs[0].folder


def tensors(run: Run, record: Record) -> dict[str, torch.Tensor]:
    """All that an update saved, behind its policy too."""
    state = state_directory(run, record.policy_version)
    found = {
        f"{name}:{key}": tensor
        for name in ("policy", "critic")
        for key, tensor in whole_state(state, name).items()
    }
    found |= {
        f"critic:{key}": t
        for path in state.glob("critic/*.safetensors")
        for key, t in load_file(path).items()
    }
    for entry in record.outputs:
        path = run.paths.root / entry.path
        if path.suffix == ".safetensors":
            name = entry.path.replace("." + record.attempt, "")
            found |= {f"{name}:{key}": tensor for key, tensor in load_file(path).items()}
    return found


def assert_close(run: Run, record: Record, other: Run, expected: Record, tolerance: float = 1e-5) -> None:
    """Weights, moments and metrics, relative to the largest entry of each tensor."""
    ours, theirs = tensors(run, record), tensors(other, expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        largest = float(tensor.float().abs().max())
        difference = float((ours[name].float() - tensor.float()).abs().max())
        assert difference <= tolerance * largest + 1e-9, (name, difference, largest)
    common = [{n for n in one.metrics if not n.startswith(_OF_SOME)} for one in (record, expected)]
    assert common[0] == common[1]
    # How rows share micro-batches is no result.
    for name in {
        name for name in record.metrics if not name.startswith((*TIMING, "policy/padding", "model_"))
    }:
        assert record.metrics[name] == pytest.approx(expected.metrics[name], rel=10 * tolerance, abs=1e-6), (
            name
        )


def respond_and_score(run: Run, iteration: int) -> Run:
    for name in ("rollout", "reward"):
        for shard in (0, 1):
            done = processes.stage(run, name, iteration, shard)
            assert done.code == 0, done.log
    return run


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """Lines of this process's log, with their levels."""
    from stages.logs import log

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname}: {record.getMessage()}")
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)
