"""States that a thread writes while the next update computes: the same bytes as those written in between,
killed or not, by one rank and by several.
"""

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.run.commits import read_record
from pipeline.run.directory import load_run
from pipeline.run.plan import policy_maker, state_of
from stages import ranks
from tests.support.updates import (
    ITERATIONS,
    Updates,
    assert_same_learned,
    by_ranks,
    copied,
    lines_of,
    scored_run,
    update,
    update_all,
)

ALL = range(1, ITERATIONS + 1)
DIVISIONS = [(1, "fp32-zero0"), (2, "bf16-zero3")]
FULL = 2
"""Iteration whose state the disk does not take."""


@pytest.fixture(scope="module")
def scored(models, tmp_path_factory) -> dict[str, Path]:
    """Runs that want their first update, by case."""
    folder = tmp_path_factory.mktemp("scored")
    given, found = None, {}
    for case in dict.fromkeys(case for _, case in DIVISIONS):
        run = scored_run(models, folder / case, case, 1, given)
        given = given or run
        found[case] = run.paths.root
    return found


@pytest.fixture(scope="module")
def loaded(scored, tmp_path_factory) -> dict[tuple[int, str], Path]:
    """Runs of which each update was done by a process that does not stay, and writes its state itself."""
    folder, found = tmp_path_factory.mktemp("loaded"), {}
    for size, case in DIVISIONS:
        root = found[size, case] = copied(scored[case], folder / f"{size}-{case}")
        wanted = [Updates(root, case, ALL, stays=False)]
        assert by_ranks(size, folder / "meeting", update_all, wanted, None) == [0] * size
    return found


@contextlib.contextmanager
def slow_writing(seconds: float) -> Iterator[None]:
    """Each piece of a state's file takes so long; those of policies, no time."""
    from stages.ppo.state import tensor_files

    write_all = tensor_files._write_all

    def written(file, data) -> None:
        if "/state/" in str(file.name):
            time.sleep(seconds)
        write_all(file, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "_write_all", written)
        yield


def slowly(root: Path, case: str, rank: int) -> None:
    with slow_writing(0.01):
        update_all([Updates(root, case, ALL)], None, rank)


@pytest.mark.parametrize(("size", "case"), DIVISIONS)
def test_states_written_while_the_next_update_changes_all_are_the_same_to_the_last_byte(
    size, case, scored, loaded, tmp_path
):
    root = copied(scored[case], tmp_path / "run")
    assert by_ranks(size, tmp_path / "meeting", slowly, root, case) == [0] * size
    assert_same_learned(root, loaded[size, case], ALL, ALL)
    paths = load_run(root).paths
    states = [read_record(paths, state_of(version)) for version in ALL]
    updates = [read_record(paths, policy_maker(version)) for version in ALL]
    assert all(state.ended > after.started for state, after in zip(states, updates[1:], strict=False))
    assert all(one.ended <= after.started for one, after in itertools.pairwise(states))
    told = set().union(*(update.metrics for update in updates))  # the last may end before the state before it
    assert {"seconds/state/write", "seconds/state/held_up"} <= told
    assert not updates[0].metrics.keys() & {"seconds/state/write", "seconds/state/held_up"}


def killed_computing(root: Path, case: str, rank: int) -> None:
    """Two updates; killed in the third, when half of the second one's state is written. Every rank."""
    from stages.ppo.state import tensor_files

    ranks.start_distributed()
    write_all, begun = tensor_files._write_all, threading.Event()

    def stuck(file, data) -> None:
        if "/state/00002." in str(file.name) and file.tell():
            write_all(file, data[: len(data) // 2])
            begun.set()
            time.sleep(600)
        write_all(file, data)

    def die(*_: object) -> None:
        assert begun.wait(60), "the state was not being written"
        ranks.share(None)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "_write_all", stuck)
        for iteration in (1, 2, 3):
            if iteration == 3:
                patch.setattr("stages.ppo.training.take_step", die)
            update(Updates(root, case, ()), iteration, f"1-{iteration}-killed")


@pytest.mark.parametrize(("size", "case"), DIVISIONS)
def test_killed_while_a_state_is_written_and_the_next_update_computes_the_end_is_the_same(
    size, case, scored, loaded, tmp_path
):
    root = copied(scored[case], tmp_path / "run")
    codes = by_ranks(size, tmp_path / "meeting", killed_computing, root, case)
    assert -signal.SIGKILL in codes, codes
    paths = load_run(root).paths
    assert read_record(paths, policy_maker(2))
    assert read_record(paths, state_of(1))
    assert read_record(paths, state_of(2)) is None
    wanted = [Updates(root, case, (3, 4), process=2)]
    assert by_ranks(size, tmp_path / "meeting", update_all, wanted, None) == [0] * size
    assert_same_learned(root, loaded[size, case], ALL, (1, 3, 4))
    assert "iteration 2 learned again: its weights differ from the committed ones by 0.0e+00" in "\n".join(
        lines_of(root, 3)
    )


def full_disk(root: Path, case: str, rank: int) -> None:
    """The disk takes one state not: in the thread of the last rank it fails."""
    from stages.ppo.state import tensor_files

    ranks.start_distributed()
    write_all = tensor_files._write_all

    def written(file, data) -> None:
        if f"/state/{FULL:05d}." in str(file.name) and ranks.rank() == ranks.size() - 1:
            raise OSError(28, "No space left on device", str(file.name))
        write_all(file, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "_write_all", written)
        update_all([Updates(root, case, ALL)], None, rank)


@pytest.mark.parametrize(("size", "case"), DIVISIONS)
def test_a_full_disk_loses_one_state_and_says_so_and_the_next_is_written_before_its_attempt_ends(
    size, case, scored, loaded, tmp_path
):
    root = copied(scored[case], tmp_path / "run")
    assert by_ranks(size, tmp_path / "meeting", full_disk, root, case) == [0] * size
    others = [version for version in ALL if version != FULL]
    assert_same_learned(root, loaded[size, case], ALL, others)
    paths = load_run(root).paths
    assert read_record(paths, state_of(FULL)) is None
    assert not list(paths.states.glob(f"{FULL:05d}.*")), "what was written in vain keeps the disk full"
    said = "\n".join(line for iteration in ALL for line in lines_of(root, iteration))
    assert f"iteration {FULL}: the trainer's state was not saved" in said
    state, after = read_record(paths, state_of(FULL + 1)), read_record(paths, policy_maker(FULL + 2))
    assert state.ended <= after.started, "not in the attempt"


def without_room(root: Path, case: str, rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:  # both are of one host
            patch.setattr("stages.ppo.state.copying.free_bytes", lambda: 1000.0)
        update_all([Updates(root, case, ALL)], None, rank)


@pytest.mark.parametrize(("size", "case"), DIVISIONS)
def test_without_room_for_a_copy_states_are_written_in_between_and_the_log_says_why(
    size, case, scored, loaded, tmp_path
):
    root = copied(scored[case], tmp_path / "run")
    assert by_ranks(size, tmp_path / "meeting", without_room, root, case) == [0] * size
    assert_same_learned(root, loaded[size, case], ALL, ALL)
    paths = load_run(root).paths
    for version in ALL[:-1]:
        lines = [line for line in lines_of(root, version) if "no room for a copy" in line]
        assert len(lines) == 1
        assert "update.save_every" in lines[0]
        assert read_record(paths, state_of(version)).ended <= (
            read_record(paths, policy_maker(version + 1)).started
        )
