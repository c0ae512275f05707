"""Ranks of an update, killed at every point behind their policy's commit: the next update ends the same.

``make soak`` goes through all of it: each point, at each number of ranks and ZeRO stage, by each rank, alone
or with all.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.run.commits import Record, read_record, verify_outputs
from pipeline.run.directory import Run, load_run
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.states import remove_unfinished
from pipeline.run.tasks import Stage, Task
from pipeline.workers.beats import Reason
from stages import ranks
from stages.attempts.arguments import Arguments
from tests.support.processes import make_run
from tests.support.ranks import assert_close, ended, said, start_ranks
from tests.support.scored import commit_scored
from tests.support.tables import sample
from tests.support.updates import (
    OF_ANY_RANK,
    POINTS,
    Kill,
    assert_same_learned,
    by_ranks,
    copied,
    dying,
    folder_name,
    kills,
    lines_of,
)

SMALL_FILES = 150_000
"""Bytes of a state's file, so few that a tiny model has several."""
Division = tuple[int, int]
"""Ranks and ZeRO stage."""
DIVISIONS: Sequence[Division] = list(itertools.product((1, 2), range(4)))
SETTINGS = ("iterations=3", "update.epsilon=1e-3", "update.epochs=1")


@dataclass(frozen=True)
class Case:
    size: int
    zero_stage: int
    kill: Kill

    @property
    def division(self) -> Division:
        return self.size, self.zero_stage

    def __str__(self) -> str:
        return f"{self.size}-zero{self.zero_stage}-{folder_name(self.kill)}"


def all_cases() -> list[Case]:
    return [Case(size, zero, kill) for size, zero in DIVISIONS for kill in kills(size)]


def was_committed(kill: Kill) -> bool:
    return kill.point == "state linked"


def some_cases() -> list[Case]:
    """Of every point by two ranks and every other by one: one of each division that loses its state, one that
    does not, and one whose other rank lives on."""
    two = [
        Case(2, number % 4, Kill(point, point in OF_ANY_RANK and number % 2 == 0, number % 3 == 0))
        for number, point in enumerate(POINTS)
    ]
    table = [*(Case(1, number % 4, Kill(point)) for number, point in enumerate(POINTS[::2])), *two]
    tables = [[c for c in table if c.division == d and not was_committed(c.kill)] for d in DIVISIONS]
    tables += [[c for c in table if was_committed(c.kill)], [c for c in two if c.kill.alone]]
    chosen = {case for rows in tables for case in sample(rows, 1 / len(table), key=str)}
    return [case for case in table if case in chosen]


CASES = all_cases() if "SOAK_ROUNDS" in os.environ else some_cases()
TWICE: Sequence[Division] = [(1, 2), (2, 3)]
"""By whom two states in a row are lost."""
ELASTIC: Sequence[tuple[Division, Division]] = [
    ((1, 0), (2, 2)),
    ((2, 3), (1, 1)),
    ((2, 1), (1, 3)),
    ((1, 2), (2, 0)),
]
"""Who learned the first iteration, and who goes on."""


# what the ranks do


def keep_a_copy(patch: pytest.MonkeyPatch) -> None:
    """As on GPUs, where each rank copies its part before it writes."""
    patch.setattr("stages.ppo.state.writer.device", lambda: torch.device("cuda"))


def execute_update(run: Run, iteration: int, name: str) -> None:
    from stages.attempts.execution import execute

    execute(Arguments(Task(iteration, Stage.UPDATE), run.paths.root, name, None), time.time())


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


# runs


@pytest.fixture(scope="module")
def scored(models, tmp_path_factory) -> dict[int, Path]:
    """Runs that want their first update, by ZeRO stage."""
    folder = tmp_path_factory.mktemp("scored")
    runs = [make_run(models, folder / f"{z}", *SETTINGS, f"update.zero_stage={z}") for z in range(4)]
    first = commit_scored(runs[0])
    for run in runs[1:]:
        for part in ("data", "iterations"):
            shutil.copytree(first.paths.root / part, run.paths.root / part, dirs_exist_ok=True)
    return {zero: run.paths.root for zero, run in enumerate(runs)}


@pytest.fixture(scope="module")
def whole(scored, tmp_path_factory) -> dict[Division, Path]:
    """Two updates that nothing disturbs, and where two are killed a third."""
    folder = tmp_path_factory.mktemp("whole")
    found = {(size, zero): copied(scored[zero], folder / f"{size}-{zero}") for size, zero in DIVISIONS}
    for size in (1, 2):
        updates = [
            (root, iteration)
            for division, root in found.items()
            for iteration in (1, 2, 3)[: 3 if division in TWICE else 2]
            if division[0] == size
        ]
        assert by_ranks(size, folder / "meeting", undisturbed, updates) == [0] * size
    return found


def kill_update(case: Case, root: Path, iteration: int = 1) -> None:
    """An update that is killed; ranks that live on end by themselves."""
    codes = by_ranks(case.size, root / "meeting", attempt, root, iteration, case.kill)
    assert (root / f"died-{iteration}").exists(), f"never came to it: {case}, {codes}"
    victim = case.size - 1 if case.kill.by_last else 0
    for rank, code in enumerate(codes):
        spared = case.kill.alone and rank != victim
        assert code in ((0,) if spared else (-signal.SIGKILL, 0)), (case, codes)
    assert codes[victim] == -signal.SIGKILL


@pytest.fixture(scope="module")
def killed(scored, tmp_path_factory) -> dict[Case, Path]:
    """Runs whose first update was killed."""
    folder = tmp_path_factory.mktemp("killed")
    found = {}
    for case in CASES:
        found[case] = copied(scored[case.zero_stage], folder / str(case))
        kill_update(case, found[case])
    return found


@pytest.fixture(scope="module")
def continued(killed, tmp_path_factory) -> dict[Case, Path]:
    """The same after the next update."""
    folder = tmp_path_factory.mktemp("continued")
    found = {case: copied(root, folder / str(case)) for case, root in killed.items()}
    for size in (1, 2):
        updates = [(root, 2) for case, root in found.items() if case.size == size]
        assert by_ranks(size, folder / "meeting", undisturbed, updates) == [0] * size
    return found


def one_that_lost_its_state(killed: dict[Case, Path], division: Division) -> Path:
    return next(
        root for case, root in killed.items() if case.division == division and not was_committed(case.kill)
    )


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=str)
def test_wherever_an_update_is_killed_behind_its_policy_the_next_one_ends_the_same(
    case, killed, continued, whole
):
    is_kept = was_committed(case.kill)
    assert (read_record(load_run(killed[case]).paths, state_of(1)) is not None) is is_kept
    root = continued[case]
    assert_same_learned(root, whole[case.division], (1, 2), (1, 2) if is_kept else (2,))
    lines = lines_of(root, 2)
    assert any("state of iteration 1 was lost" in line for line in lines) is not is_kept
    same = "its weights differ from the committed ones by 0.0e+00 of what it changed"
    assert any(line.endswith(same) for line in lines) is not is_kept
    assert not any(line.startswith(("ERROR", "WARNING")) for line in lines), lines


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_killed_update_has_written_in_vain_goes_once_the_next_one_is_done(case, continued):
    paths = load_run(continued[case]).paths
    remove_unfinished(paths, 1)
    is_kept = was_committed(case.kill)
    assert [path.name for path in paths.states.glob("00001.*")] == ["00001.1-killed"] * is_kept
    left = [path.name for path in paths.task(state_of(1)).folder.iterdir()]
    assert left == ["shard-00000.json"] * is_kept
    for task in (state_of(1), state_of(2))[not is_kept :]:
        record = read_record(paths, task)
        assert record is not None
        verify_outputs(paths, record)


@pytest.mark.parametrize("case", [case for case in CASES if case.kill.alone and case.size == 2], ids=str)
def test_a_rank_that_outlives_another_says_that_the_state_was_not_saved(case, killed):
    survivor = 0 if case.kill.by_last else 1
    lines = lines_of(killed[case], 1, survivor)
    is_done = POINTS.index(case.kill.point) > POINTS.index("not collected")
    assert any("the trainer's state was not saved; the policy is committed" in line for line in lines) is (
        not is_done
    )


def test_a_rank_that_fails_alone_ends_so_that_no_other_waits_for_it(scored, tmp_path):
    """Else both would hold their GPUs until a collective's limit, for half an hour."""
    root = copied(scored[1], tmp_path / "run")
    started = start_ranks(2, tmp_path / "meeting", fail_alone, root)
    try:
        assert ended(started) == [1, 1]
    finally:
        for process in started:
            process.kill()


def test_a_rank_that_loses_the_others_at_the_very_end_removes_nothing_that_is_committed(scored, tmp_path):
    root = copied(scored[1], tmp_path / "run")
    assert by_ranks(2, tmp_path / "meeting", attempt_cut_off, root) == [0, 0]
    assert "the trainer's state was not saved" in "".join(lines_of(root, 1, rank=1))
    paths = load_run(root).paths
    record = read_record(paths, state_of(1))
    assert record is not None
    verify_outputs(paths, record)


@pytest.mark.parametrize("division", TWICE, ids=str)
def test_two_states_that_are_lost_in_a_row_are_learned_again(division, killed, whole, tmp_path):
    size, zero_stage = division
    root = copied(one_that_lost_its_state(killed, division), tmp_path / "run")
    kill_update(Case(size, zero_stage, Kill("half the critic")), root, 2)
    assert by_ranks(size, tmp_path / "meeting", undisturbed, [(root, 3)]) == [0] * size
    assert_same_learned(root, whole[division], (1, 2, 3), (3,))
    lines = "\n".join(lines_of(root, 3))
    for iteration in (1, 2):
        assert f"state of iteration {iteration} was lost" in lines
        assert f"iteration {iteration} learned again: its weights differ from the committed ones by 0.0e" in (
            lines
        )
    assert "ERROR" not in lines


def run_like(models: Path, root: Path, zero_stage: int, target: Path) -> Run:
    """A run at another ZeRO stage that has what one has after its first update."""
    run = make_run(models, target, *SETTINGS, f"update.zero_stage={zero_stage}")
    later = shutil.ignore_patterns("00002.*", "00003.*")
    for part in [name for name in ("data", "policy", "state") if (root / name).exists()]:
        shutil.copytree(root / part, run.paths.root / part, dirs_exist_ok=True, symlinks=True, ignore=later)
    shutil.copytree(root / "iterations", run.paths.iterations, dirs_exist_ok=True)
    for task in (f(iteration) for f in (policy_maker, state_of) for iteration in (2, 3)):
        shutil.rmtree(run.paths.task(task).folder, ignore_errors=True)
    return run


@pytest.fixture(scope="module")
def elastic(models, killed, whole, tmp_path_factory) -> dict[tuple[Division, Division, bool], Run]:
    """Second updates by other ranks at another ZeRO stage than the first, whose state was lost or not."""
    folder = tmp_path_factory.mktemp("elastic")
    found = {}
    for before, after in ELASTIC:
        name = f"{before[0]}-{before[1]}-to-{after[0]}-{after[1]}"
        lost = one_that_lost_its_state(killed, before)
        for is_lost, root in ((True, lost), (False, whole[before])):
            target = folder / f"{name}-{'lost' if is_lost else 'kept'}"
            found[before, after, is_lost] = run_like(models, root, after[1], target)
    for size in (1, 2):
        updates = [(run.paths.root, 2) for (_, after, _), run in found.items() if after[0] == size]
        assert by_ranks(size, folder / "meeting", undisturbed, updates) == [0] * size
    return found


@pytest.mark.parametrize("is_lost", [False, True], ids=["kept", "lost"])
@pytest.mark.parametrize(("before", "after"), ELASTIC)
def test_other_ranks_at_another_zero_stage_go_on_from_a_state_or_learn_it_again(
    before, after, is_lost, elastic, whole
):
    """Within the bounds of tests/stages/test_invariance.py: moments and critic too, and what metrics say."""
    run, expected = elastic[before, after, is_lost], load_run(whole[1, 0])
    assert (read_record(run.paths, state_of(1)) is None) is is_lost
    ours, theirs = (record_of(one, 2) for one in (run, expected))
    assert ours.metrics["policy/ratio_error_first"] == 0
    assert_close(run, ours, expected, theirs)
    lines = "\n".join(lines_of(run.paths.root, 2))
    assert "ERROR" not in lines
    if is_lost:
        said = r"iteration 1 learned again: its weights differ from the committed ones by ([-+.e\d]+) of"
        assert float(re.search(said, lines)[1]) < 1e-4
        assert f"zero_stage {after[1]} instead of {before[1]}" in lines
        assert f"ranks {after[0]} instead of {before[0]}" in lines


def record_of(run: Run, iteration: int) -> Record:
    record = read_record(run.paths, policy_maker(iteration))
    assert record is not None
    return record
