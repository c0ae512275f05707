"""Updates of real ranks, killed on the way from their policy's commit to their state's."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from pipeline.run.directory import Run, load_run
from pipeline.run.plan import policy_maker
from pipeline.run.tasks import Stage, Task
from pipeline.workers.beats import Reason
from stages import ranks
from stages.attempts.arguments import Arguments
from tests.support.ranks import said, start_ranks

SMALL_FILES = 150_000
"""Bytes of a state's file, so few that a tiny model has several."""
OF_ANY_RANK = ("detached", "half a file", "not flushed", "between files", "slices written")
OF_THE_FIRST = (
    "policy committed",
    "critic's settings",
    "half the critic",
    "not collected",
    "no counters",
    "half the counters",
    "state not linked",
    "state linked",
)
POINTS = (*OF_THE_FIRST[:1], *OF_ANY_RANK, *OF_THE_FIRST[1:])
"""In the order in which an attempt comes to them."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL at a point between a policy's commit and its state's."""

    point: str
    by_last: bool = False
    """Whether it is the last rank that comes to the point, not the first."""
    alone: bool = False
    """Whether only that rank is killed, not all of the attempt's at once."""

    def __str__(self) -> str:
        return f"{self.point}{', last rank' if self.by_last else ''}{', alone' if self.alone else ''}"


def kills(size: int) -> list[Kill]:
    """All that differ, with so many ranks."""
    if size == 1:
        return [Kill(point) for point in POINTS]
    return [
        Kill(point, by_last, alone)
        for point in POINTS
        for by_last in (False, True)[: 1 + (point in OF_ANY_RANK)]
        for alone in (False, True)
    ]


def folder_name(kill: Kill) -> str:
    return str(kill).replace(", ", "-").replace(" ", "-").replace("'", "")


# what the ranks do


@contextlib.contextmanager
def dying(root: Path, iteration: int, kill: Kill) -> Iterator[None]:
    """The kill comes when its rank comes to its point. Every rank takes part."""
    peers = [os.pidfd_open(pid) for pid in ranks.share(os.getpid()) if pid != os.getpid()]

    def die() -> None:
        (root / f"died-{iteration}").write_text(f"rank {ranks.rank()}")
        for peer in [] if kill.alone else peers:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(peer, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank() == (ranks.size() - 1 if kill.by_last else 0):
            ARMED[kill.point](patch, die)
        yield


def attempt(root: Path, iteration: int, kill: Kill | None, rank: int) -> None:
    """One update, which may be killed. What it says is left in a file, if it lives to its end."""
    ranks.start_distributed()
    with said() as lines, contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("stages.ppo.state.saved_state.LARGEST_FILE", SMALL_FILES)
        if kill is not None and kill.point == "detached":
            keep_a_copy(patch)
        if kill is not None:
            stack.enter_context(dying(root, iteration, kill))
        execute_update(load_run(root), iteration, "1-killed")
    (root / f"said-{iteration}-{rank}.json").write_text(json.dumps(lines))


def undisturbed(updates: Sequence[tuple[Path, int]], rank: int) -> None:
    """Updates of several runs, each a run and an iteration, by the same processes one after the other."""
    ranks.start_distributed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.ppo.state.saved_state.LARGEST_FILE", SMALL_FILES)
        for root, iteration in updates:
            with said() as lines:
                execute_update(load_run(root), iteration, "2-next")
            (root / f"said-{iteration}-{rank}.json").write_text(json.dumps(lines))
            ranks.share(None)
    assert "torch._inductor.compile_fx" not in sys.modules, (
        "torch's compiler was imported, which takes seconds"
    )


def attempt_cut_off(root: Path, rank: int) -> None:
    """One update whose last rank loses the others as soon as the first knows of every rank's files."""
    from stages.ppo.state.writer import LearnerState

    share, collect = ranks.share, LearnerState._all_files

    def share_and_lose(value: object) -> list[object]:
        share(value)
        raise RuntimeError("connection closed by peer")

    def cut_off(state: LearnerState, written: Any) -> Any:
        if ranks.rank() == ranks.size() - 1:
            patch.setattr(ranks, "share", share_and_lose)
        return collect(state, written)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LearnerState, "_all_files", cut_off)
        attempt(root, 1, None, rank)


class FirstUpdate:
    """Source of a worker that is given the first update, the same attempt on each rank."""

    def __init__(self, root: Path) -> None:
        self._given = iter([Arguments(policy_maker(1), root, "1-alone", None, stays=True)])

    def next(self) -> Arguments | None:
        return next(self._given, None)

    def ended(self, arguments: Arguments, exit_code: int) -> None:
        pass

    def leave(self, reason: Reason) -> None:
        self._given = iter(())

    def left(self) -> None:
        pass


def fail_alone(root: Path, rank: int) -> None:
    """A worker of several ranks of which the last fails at a step, where the others wait for it. As on GPUs
    they tell each other things apart from what they compute together."""
    from stages.workers.loop import work

    ranks.start_distributed()
    ranks._messages = torch.distributed.new_group(backend="gloo")
    with pytest.MonkeyPatch.context() as patch:
        if rank == ranks.size() - 1:
            patch.setattr("stages.ppo.training.take_step", out_of_memory)
        sys.exit(work(FirstUpdate(root)))


def out_of_memory(*_: object) -> None:
    raise RuntimeError("CUDA out of memory")


def execute_update(run: Run, iteration: int, name: str) -> None:
    from stages.attempts.execution import execute

    execute(Arguments(Task(iteration, Stage.UPDATE), run.paths.root, name, None), time.time())


def lines_of(root: Path, iteration: int, rank: int = 0) -> list[str]:
    return json.loads((root / f"said-{iteration}-{rank}.json").read_text())


def by_ranks(size: int, meeting: Path, function: Callable[..., None], *given: object) -> list[int | None]:
    """Call it in a fork per rank. Returns how they ended."""
    with contextlib.suppress(FileNotFoundError):  # of an attempt that was killed before all had met
        meeting.unlink()
    started = start_ranks(size, meeting, function, *given)
    for process in started:
        process.join(timeout=600)
    return [process.exitcode for process in started]


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, symlinks=True))


# where they die


def keep_a_copy(patch: pytest.MonkeyPatch) -> None:
    """As on GPUs, where each rank copies its part before it writes."""
    patch.setattr("stages.ppo.state.writer.device", lambda: torch.device("cuda"))


def _call(before: Callable[[], None] | None, after: Callable[[], None] | None, function: Any) -> Any:
    def called(*given: Any, **named: Any) -> Any:
        if before:
            before()
        result = function(*given, **named)
        if after:
            after()
        return result

    return called


def _before(name: str) -> Callable[[pytest.MonkeyPatch, Callable[[], None]], None]:
    """Die instead of calling a function."""
    return lambda patch, die: patch.setattr(name, _call(die, None, resolve_name(name)))


def _after(name: str) -> Callable[[pytest.MonkeyPatch, Callable[[], None]], None]:
    """Die when a function has done what it does."""
    return lambda patch, die: patch.setattr(name, _call(None, die, resolve_name(name)))


def _at_link(stage: str, is_done: bool) -> Callable[[pytest.MonkeyPatch, Callable[[], None]], None]:
    """Die before or after a record of ``stage`` gets its name."""

    def arm(patch: pytest.MonkeyPatch, die: Callable[[], None]) -> None:
        link = os.link

        def linked(source: str, target: str, **options: int) -> None:
            folder = Path(f"/proc/self/fd/{options['dst_dir_fd']}").readlink()
            is_it = folder.name == stage and target.endswith(".json")
            if is_it and not is_done:
                die()
            link(source, target, **options)
            if is_it:
                die()

        patch.setattr(os, "link", linked)

    return arm


def _within_file(part: str) -> Callable[[pytest.MonkeyPatch, Callable[[], None]], None]:
    """Die when half the numbers of a state's file whose path contains ``part`` are written."""

    def arm(patch: pytest.MonkeyPatch, die: Callable[[], None]) -> None:
        from stages.ppo.state import tensor_files

        write_all = tensor_files._write_all

        def written(file: Any, data: memoryview) -> None:
            if is_of_state(file, part) and file.tell():  # the header is there
                write_all(file, data[: len(data) // 2])
                die()
            write_all(file, data)

        patch.setattr(tensor_files, "_write_all", written)

    return arm


def _at_flush(is_done: bool) -> Callable[[pytest.MonkeyPatch, Callable[[], None]], None]:
    """Die before or after the first file of slices is flushed."""

    def arm(patch: pytest.MonkeyPatch, die: Callable[[], None]) -> None:
        from stages.ppo.state import tensor_files

        flush = tensor_files.flush

        def flushed(file: Any) -> None:
            if is_of_state(file, "-rank-") and not is_done:
                die()
            flush(file)
            if is_of_state(file, "-rank-"):
                die()

        patch.setattr(tensor_files, "flush", flushed)

    return arm


def is_of_state(file: Any, part: str) -> bool:
    return "/state/" in str(file.name) and part in str(file.name)


def _settings_of_critic(patch: pytest.MonkeyPatch, die: Callable[[], None]) -> None:
    """Die when the critic's folder has all but weights."""
    from stages.ppo.state.model_files import ModelFiles

    write = ModelFiles._write_settings

    def written(files: ModelFiles, folder: Path) -> None:
        write(files, folder)
        if folder.parent.parent.name == "state":
            die()

    patch.setattr(ModelFiles, "_write_settings", written)


def _half_counters(patch: pytest.MonkeyPatch, die: Callable[[], None]) -> None:
    from stages.ppo.state import writer

    write = writer.write_counters

    def written(folder: Path, counters: Any) -> None:
        write(folder, counters)
        path = folder / "counters.json"
        os.truncate(path, path.stat().st_size // 2)
        die()

    patch.setattr(writer, "write_counters", written)


_WRITER = "stages.ppo.state.writer"
ARMED: dict[str, Callable[[pytest.MonkeyPatch, Callable[[], None]], None]] = {
    "policy committed": _at_link("update", is_done=True),
    "detached": _after(f"{_WRITER}.LearnerState.detach"),
    "half a file": _within_file("-rank-"),
    "not flushed": _at_flush(is_done=False),
    "between files": _at_flush(is_done=True),
    "slices written": _after(f"{_WRITER}.LearnerState._write_slices"),
    "critic's settings": _settings_of_critic,
    "half the critic": _within_file("/critic/"),
    "not collected": _before(f"{_WRITER}.LearnerState._all_files"),
    "no counters": _before(f"{_WRITER}.write_counters"),
    "half the counters": _half_counters,
    "state not linked": _at_link("state", is_done=False),
    "state linked": _at_link("state", is_done=True),
    "policy not written": _before("stages.ppo.update.save_policy"),
    "a step taken": _after("stages.ppo.training.take_step"),
    "a step followed": _after("stages.ppo.following._carry_out"),
    "settled": _after("stages.ppo.replay.settle"),
    "saved on the way": _after("stages.ppo.replay.save_state"),
}
