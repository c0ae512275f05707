"""Updates of real ranks, in processes that stay, or killed between a policy's commit and its state's."""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from pipeline.run.commits import read_record, verify_outputs
from pipeline.run.directory import Run, create_run, load_run
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.tasks import Stage, Task
from stages import ranks
from stages.process import background
from stages.workers.kept_trainer import finish_state, save_kept_trainer
from tests.support.processes import config_of
from tests.support.ranks import said, start_ranks
from tests.support.scored import commit_scored
from tests.support.used import settled_bytes

ITERATIONS = 4
CASES = {
    "fp32-zero0": ["update.zero_stage=0"],
    "bf16-zero1": ["update.zero_stage=1", "update.precision=bf16"],
    "bf16-zero2": ["update.zero_stage=2", "update.precision=bf16"],
    "bf16-zero3": ["update.zero_stage=3", "update.precision=bf16"],
    "overflow": ["update.zero_stage=2", "update.precision=fp16", "update.epochs=4"],
    "stopped": ["algorithm.target_kl=1e-9"],
    "skipped": ["update.zero_stage=1", "update.precision=bf16"],
    "lora": ["update.zero_stage=3", "update.lora.rank=2"],
    "no-critic": ["algorithm.estimator=reinforce++", "update.zero_stage=2", "update.precision=bf16"],
    "m2po": ["algorithm.correction={level: token, mode: m2po, second_moment: 0.02}", "update.zero_stage=1"],
    "rollouts": [
        *("algorithm=grpo", "rollout.samples_per_prompt=2", "data.prompts_per_iteration=4"),
        *("algorithm.old_log_probs=rollout", "update.zero_stage=2"),
    ],
    "teacher": [
        *("reward.teachers.teacher.path={policy}", "algorithm.distillation={placement: loss, top_k: 3}"),
        "update.zero_stage=1",
    ],
    "warmup": ["algorithm.critic_warmup=2", "update.zero_stage=1"],
}
"""Precision and ZeRO stage, or what happens on the way."""
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


def lines_of(root: Path, iteration: int, rank: int = 0) -> list[str]:
    return json.loads((root / f"said-{iteration}-{rank}.json").read_text())


def assert_same_learned(root: Path, expected: Path, iterations: Sequence[int], states: Sequence[int]) -> None:
    """Some policies and states, as committed and as they lie on the disk, to the last byte."""
    ours, theirs = load_run(root).paths, load_run(expected).paths
    for task in (*map(policy_maker, iterations), *map(state_of, states)):
        found, wanted = read_record(ours, task), read_record(theirs, task)
        assert found is not None, task
        assert found.fingerprint == wanted.fingerprint, task
        verify_outputs(ours, found)


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
    "a step followed": _after("stages.ppo.learner._carry_out"),
    "settled": _after("stages.ppo.resuming.settle"),
    "saved on the way": _after("stages.ppo.resuming.save_state"),
}


# runs of which every update is wanted


def scored_run(
    models: Path,
    root: Path,
    case: str,
    save_every: int,
    given: Run | None = None,
    iterations: int = ITERATIONS,
) -> Run:
    """A run that wants its first update; its shards are those of another, if one is given."""
    words = [word.replace("{policy}", str(models / "policy")) for word in CASES[case]]
    config = config_of(models, root, f"iterations={iterations}", "update.epsilon=1e-3", *words)
    run = create_run(replace(config, update=replace(config.update, save_every=save_every)))
    if given is None or config.rollout.samples_per_prompt > 1 or config.reward.teachers:
        return commit_scored(run)
    for part in ("data", "iterations"):
        shutil.copytree(given.paths.root / part, run.paths.root / part, dirs_exist_ok=True)
    return run


def with_high_loss_scale(*given: object) -> dict:
    """An engine's settings of which the first steps overflow."""
    from stages.ppo.zero import engine_settings

    settings = engine_settings(*given)
    return settings | {"fp16": settings["fp16"] | {"initial_scale_power": 24}}


@contextlib.contextmanager
def happening(case: str, iteration: int) -> Iterator[pytest.MonkeyPatch]:
    """What the case is about happens."""
    from stages.ppo import trainer, training

    def spoiled(tally: object, experience: object, place: training.StepPosition) -> str | None:
        return "made up" if place.number == 1 else None

    with pytest.MonkeyPatch.context() as patch:
        if case == "overflow":
            patch.setattr(trainer, "engine_settings", with_high_loss_scale)
        if case == "skipped" and iteration == 2:
            patch.setattr(training, "problem_of", spoiled)
        yield patch


@dataclass(frozen=True)
class Updates:
    """Updates of a run, one after the other in the same process."""

    root: Path
    case: str
    iterations: Sequence[int]
    stays: bool = True
    """Whether the process may get another one, so that it keeps its learner."""
    loads_ahead: bool = False
    """Whether the process has loaded what each needs before."""
    is_slow: bool = False
    """Whether a replay takes so long that it saves each state on its way."""
    leaves: bool = False
    """Whether the process leaves afterwards as planned, and saves what it has kept."""
    process: int = 1
    """Number among those that have been at the run: attempts of each have names of their own."""


def update(updates: Updates, iteration: int, name: str = "1-aa") -> list[str]:
    """One update by all ranks. Returns what this one says."""
    from stages.attempts.arguments import Arguments
    from stages.attempts.execution import execute, load
    from stages.ppo import resuming

    task = Task(iteration, Stage.UPDATE)
    with said() as lines, happening(updates.case, iteration) as patch:
        if updates.is_slow:
            patch.setattr(resuming, "longest_replay", lambda config: 0.0)
        if updates.loads_ahead:
            load(Arguments(task, updates.root, name, None, stays=True, loads=True))
        execute(Arguments(task, updates.root, name, None, stays=updates.stays), time.time())
    ranks.share(None)
    return lines


def update_all(wanted: Sequence[Updates], kill: Kill | None, rank: int) -> None:
    """Updates of several runs. The last one of all may be killed. What they say is left in files."""
    ranks.start_distributed()
    for updates in wanted:
        for iteration in updates.iterations:
            with contextlib.ExitStack() as stack:
                if kill is not None and updates is wanted[-1] and iteration == updates.iterations[-1]:
                    stack.enter_context(dying(updates.root, iteration, kill))
                name = f"{updates.process}-{iteration}-{'kept' if updates.stays else 'loaded'}"
                lines = update(updates, iteration, name)
                if kill is not None and updates is wanted[-1] and iteration == updates.iterations[-1]:
                    background.wait()
                (updates.root / f"said-{iteration}-{rank}.json").write_text(json.dumps(lines))
                if updates.leaves and iteration == updates.iterations[-1]:
                    finish_state()
                    save_kept_trainer()
        finish_state()


def memory_of_updates(root: Path, said_to: Path) -> None:
    """Do all updates of a run in this process, and write how many bytes it held after each."""
    ranks.start_distributed()
    sizes = []
    for iteration in range(1, load_run(root).plan.iterations + 1):
        lines = update(Updates(root, "", ()), iteration)
        assert any("going on from memory" in line for line in lines) is (iteration > 1)
        sizes.append(settled_bytes())
    said_to.write_text(json.dumps(sizes))
