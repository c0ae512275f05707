"""A trainer that stays learns what one does that loads everything: to the last bit, wherever it is killed."""

import gc
import itertools
import os
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pipeline.orchestrate.fork import find_parent
from pipeline.run import replays
from pipeline.run.commits import read_record
from pipeline.run.directory import load_run
from pipeline.run.identity import RunError
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.states import can_fork, can_go_on
from stages import ranks
from stages.ppo.saving import warnings_noted
from tests.support.ranks import assert_close
from tests.support.tables import IS_SOAK, sample
from tests.support.updates import (
    CASES,
    ITERATIONS,
    POINTS,
    Kill,
    Updates,
    assert_same_learned,
    by_ranks,
    copied,
    folder_name,
    kills,
    lines_of,
    scored_run,
    update,
    update_all,
)

ALL = range(1, ITERATIONS + 1)
ELASTIC = (
    [(n, case, m) for n in (1, 2, 3) for case in CASES for m in (1, 2, 3) if n != m]
    if IS_SOAK
    else [
        (1, "fp32-zero0", 2),
        *sample([(1, "overflow", 2), (1, "bf16-zero2", 3), (2, "bf16-zero3", 1)], 1 / 3),
    ]
)
"""Ranks that learn three iterations and save no state, what happens, and ranks that learn them again."""
FROM_MEMORY = "going on from memory"


@dataclass(frozen=True)
class Death:
    """A process that has done all updates before one dies in that one."""

    size: int
    case: str
    save_every: int
    iteration: int
    kill: Kill
    successor: Kill | None = None
    """How its successor is killed, which learns again from the first iteration on."""
    leaves: bool = False
    """Whether it dies as it leaves after that update, and saves the state that it has in memory alone."""

    def __str__(self) -> str:
        when = "leaving-after" if self.leaves else "in"
        where = f"{self.size}-{self.case}-every-{self.save_every}-{when}-{self.iteration}"
        kills = [self.kill] + ([self.successor] if self.successor else [])
        return "-then-".join([f"{where}-{folder_name(kills[0])}", *map(folder_name, kills[1:])])


REPLAYING = ("a step followed", "settled", "saved on the way")
EARLY = ("a step taken", "policy not written", "policy committed")
"""Points that every update comes to; to the others come those that save a state."""
SAVING = [point for point in POINTS if point not in ("policy committed", "detached")]
"""Points that a process comes to that leaves, and saves what it has in memory."""


def all_deaths() -> list[Death]:
    """Every point, with each update.save_every at which an update comes to it; the cases take turns."""
    found = []
    cases = itertools.cycle(case for case in CASES if case != "no-critic")
    for size, save_every, iteration in itertools.product((1, 2), (1, 3, 1000), range(2, ITERATIONS)):
        is_due = save_every == 1 or iteration == save_every
        points = [*EARLY, *(POINTS if is_due else ())]
        known = [Kill(point) for point in EARLY[:2]] + [k for k in kills(size) if k.point in points]
        found += [Death(size, next(cases), save_every, iteration, kill) for kill in known]
    dying = Kill("a step taken")
    for size, successor in itertools.product((1, 2), REPLAYING):
        found += [
            Death(size, next(cases), 1000, 3, dying, Kill(successor, alone=alone))
            for alone in (False, True)[:size]
        ]
    leaving = [(size, kill) for size in (1, 2) for kill in kills(size) if kill.point in SAVING]
    found += [Death(size, next(cases), 1000, 2, kill, leaves=True) for size, kill in leaving]
    return found


def some_deaths() -> list[Death]:
    """One whose successor dies too, or one that leaves, and one of the others."""
    others = [
        Death(1, "fp32-zero0", 3, 3, Kill("no counters")),
        Death(1, "skipped", 1, 2, Kill("half a file")),
        Death(1, "stopped", 3, 3, Kill("policy committed")),
        Death(1, "bf16-zero2", 1, 2, Kill("state not linked")),
        Death(2, "bf16-zero3", 1000, 3, Kill("policy committed", alone=True)),
        Death(1, "m2po", 1000, 3, Kill("a step taken")),
        Death(2, "rollouts", 1000, 3, Kill("policy committed")),
        Death(1, "teacher", 1000, 3, Kill("a step taken")),
        Death(1, "warmup", 3, 3, Kill("half the counters")),
    ]
    saved_by_others = [
        Death(1, "overflow", 1000, 3, Kill("a step taken"), Kill("settled")),
        Death(1, "stopped", 1000, 2, Kill("half a file"), leaves=True),
    ]
    return [*sample(saved_by_others, 1 / 2, key=str), *sample(others, 1 / 10, key=str)]


DEATHS = all_deaths() if IS_SOAK else some_deaths()
OF_ONE = (
    *("lora", "no-critic", "skipped", "fp32-zero0", "m2po", "rollouts"),
    *("teacher", "warmup"),
)
STAYING = list(
    itertools.product((1, 2), CASES)
    if IS_SOAK
    else dict.fromkeys(
        [
            (1, "bf16-zero2"),
            *((1, case) for case in sample(OF_ONE, 1 / 4)),
            *((death.size, death.case) for death in DEATHS),
            *((size, case) for size, case, _ in ELASTIC),
            (2, "bf16-zero3"),
        ]
    )
)
"""Ranks, and what happens: all that the tables above are compared with, and one more."""


def states_of(root: Path) -> list[int]:
    """Iterations whose states are committed."""
    paths = load_run(root).paths
    return [i for i in range(1, ITERATIONS + 1) if read_record(paths, state_of(i)) is not None]


@pytest.fixture(scope="module")
def scored(models, tmp_path_factory) -> dict[tuple[str, int], Path]:
    """Runs that want their first update, by case and update.save_every."""
    folder = tmp_path_factory.mktemp("scored")
    found, given = {}, None
    known = {(case, save_every) for _, case in STAYING for save_every in (1, 1000)}
    known |= {(case, 1000) for _, case, _ in ELASTIC} | {(death.case, death.save_every) for death in DEATHS}
    for case, save_every in sorted(known):
        run = scored_run(models, folder / f"{case}-{save_every}", case, save_every, given)
        given = given or run
        found[case, save_every] = run.paths.root
    return found


@dataclass(frozen=True)
class Learned:
    """Runs that came to their ends, by ranks and case."""

    loaded: dict[tuple[int, str], Path]
    """Each update loaded everything."""
    kept: dict[tuple[int, str], Path]
    """Each went on from memory, in a process that came from another run with other settings."""
    ahead: dict[tuple[int, str], Path]
    """Each was loaded before its turn, of one case for each number of ranks."""
    unsaved: dict[tuple[int, str, int], Path]
    """Three of four iterations, without any state, of each of :data:`ELASTIC`."""


@pytest.fixture(scope="module")
def learned(scored, tmp_path_factory) -> Learned:
    folder = tmp_path_factory.mktemp("learned")

    def copies(name: str, save_every: int) -> dict[tuple[int, str], Path]:
        return {
            (n, case): copied(scored[case, save_every], folder / f"{n}-{case}-{name}") for n, case in STAYING
        }

    unsaved = {
        one: copied(scored[one[1], 1000], folder / "-".join(["unsaved", *map(str, one)])) for one in ELASTIC
    }
    first = {n: (n, case) for n, case in reversed(STAYING)}.values()
    ahead = {(n, case): copied(scored[case, 1], folder / f"{n}-{case}-ahead") for n, case in first}
    found = Learned(copies("loaded", 1), copies("kept", 1000), ahead, unsaved)
    for size in sorted({size for size, *_ in [*STAYING, *ELASTIC]}):
        wanted = [Updates(r, case, ALL, stays=False) for (n, case), r in found.loaded.items() if n == size]
        wanted += [
            Updates(root, case, ALL, stays=False, loads_ahead=True)
            for (n, case), root in found.ahead.items()
            if n == size
        ]
        wanted += [Updates(root, case, ALL) for (n, case), root in found.kept.items() if n == size]
        wanted += [Updates(root, case, (1, 2, 3)) for (n, case, _), root in unsaved.items() if n == size]
        assert by_ranks(size, folder / "meeting", update_all, wanted, None) == [0] * size
    return found


@pytest.fixture(scope="module")
def loaded(learned) -> dict[tuple[int, str], Path]:
    return learned.loaded


@pytest.fixture(scope="module")
def kept(learned) -> dict[tuple[int, str], Path]:
    return learned.kept


def test_a_learner_that_was_loaded_before_its_shards_came_learns_the_same(learned, loaded):
    for one, root in learned.ahead.items():
        assert_same_learned(root, loaded[one], ALL, ALL)
        for iteration in ALL:
            assert any(FROM_MEMORY in line for line in lines_of(root, iteration))


@pytest.mark.parametrize(("size", "case"), STAYING)
def test_a_learner_that_stays_learns_the_same_to_the_last_bit(size, case, kept, loaded):
    assert_same_learned(kept[size, case], loaded[size, case], ALL, [ITERATIONS])
    for iteration in ALL:
        lines = lines_of(kept[size, case], iteration)
        assert any(FROM_MEMORY in line for line in lines) is (iteration > 1)
        assert not any("learned again" in line for line in lines)
        assert FROM_MEMORY not in "".join(lines_of(loaded[size, case], iteration))
    assert states_of(kept[size, case]) == [ITERATIONS]
    assert states_of(loaded[size, case]) == list(ALL)


def test_an_update_that_saves_no_state_says_so_and_is_no_end_of_the_run(kept):
    run = load_run(kept[1, "bf16-zero2"])
    for version in ALL:
        record = read_record(run.paths, policy_maker(version))
        assert record.promises_state is (version == ITERATIONS)
        assert record.skips_state is (version < ITERATIONS)
        assert can_go_on(run.plan, run.paths, version)
        assert can_fork(run.paths, version) is (version == ITERATIONS)
    with pytest.raises(RunError, match=rf"its policy is there\); choose {ITERATIONS}$"):
        find_parent(f"{run.paths.root}@1")


@pytest.fixture(scope="module")
def died(scored, learned, tmp_path_factory) -> dict[Death, Path]:
    """Runs whose first process died; another one, which stays too, has brought them to their end. Other ranks
    went on with those that nobody saved."""
    folder = tmp_path_factory.mktemp("died")
    found = {}
    for death in DEATHS:
        root = found[death] = copied(scored[death.case, death.save_every], folder / str(death))
        first = [Updates(root, death.case, range(1, death.iteration + 1), leaves=death.leaves)]
        codes = by_ranks(death.size, root / "meeting", update_all, first, death.kill)
        assert (root / f"died-{death.iteration}").exists(), f"never came to it: {death}, {codes}"
        assert any(codes), codes
        if death.successor is not None:
            kill_successor(death, root)
    for size in sorted({*(death.size for death in DEATHS), *(after for *_, after in ELASTIC)}):
        wanted = [
            Updates(root, d.case, to_do(root), process=3) for d, root in found.items() if d.size == size
        ]
        wanted += [Updates(root, case, (4,)) for (_, case, n), root in learned.unsaved.items() if n == size]
        assert by_ranks(size, folder / "meeting", update_all, wanted, None) == [0] * size
    return found


def kill_successor(death: Death, root: Path) -> None:
    """Kill a process as it learns again what one that died has not saved, each state on its way."""
    (root / f"died-{death.iteration}").unlink()
    again = [Updates(root, death.case, (death.iteration,), is_slow=True, process=2)]
    codes = by_ranks(death.size, root / "meeting", update_all, again, death.successor)
    assert (root / f"died-{death.iteration}").exists(), f"never came to it: {death}, {codes}"


def to_do(root: Path) -> Sequence[int]:
    """Iterations whose updates are not committed."""
    paths = load_run(root).paths
    return [i for i in ALL if read_record(paths, policy_maker(i)) is None]


@pytest.mark.soak
@pytest.mark.parametrize("death", DEATHS, ids=str)
def test_wherever_a_learner_that_stays_is_killed_its_successor_ends_the_same(death, died, loaded):
    expected = loaded.get((death.size, death.case))
    assert expected is not None
    root = died[death]
    assert_same_learned(root, expected, ALL, [ITERATIONS])
    first = min(i for i in ALL if FROM_MEMORY not in "".join(said_of(root, i)) and i >= death.iteration)
    lines = said_of(root, first)
    assert not any(line.startswith(("ERROR", "WARNING")) for line in lines), lines
    again = [line for line in lines if re.search(r"iteration \d+ learned again", line)]
    assert all("differ from the committed ones by 0.0e+00" in line for line in again), again
    newest = max([version for version in states_of(root) if version < first], default=0)
    assert len(again) == first - 1 - newest


def said_of(root: Path, iteration: int) -> list[str]:
    """Lines of an update that came to its end; of one that was killed there are none."""
    return lines_of(root, iteration) if (root / f"said-{iteration}-0.json").exists() else [FROM_MEMORY]


@pytest.mark.parametrize("elastic", ELASTIC, ids=str)
def test_other_ranks_learn_again_what_nobody_saved_but_for_rounding(elastic, learned, died):
    """From the first iteration on: the policies are the committed ones, and so is the first ratio."""
    root, (before, _, now) = learned.unsaved[elastic], elastic
    lines = "\n".join(lines_of(root, 4))
    apart = re.findall(r"differ from the committed ones by ([-+.e\d]+) of", lines)
    assert len(apart) == 3
    record = read_record(load_run(root).paths, policy_maker(4))
    assert record.metrics[replays.REPLAYED] == 3
    assert record.metrics[replays.DIFFERENCE] == pytest.approx(max(map(float, apart)), rel=0.1)
    assert record.metrics[replays.DIFFERENCE] < replays.WORTH_A_WARNING
    assert record.metrics["policy/ratio_error_first"] == 0
    assert not any(word in lines for word in ("ERROR", "WARNING", "not finite now"))
    assert f"ranks {now} instead of {before}" in lines


def test_what_other_ranks_go_on_to_learn_is_the_same_but_for_rounding(learned, died):
    run, other = load_run(learned.unsaved[ELASTIC[0]]), load_run(learned.loaded[ELASTIC[0][:2]])
    ours, theirs = (read_record(one.paths, policy_maker(4)) for one in (run, other))
    assert_close(run, ours, other, theirs, tolerance=1e-2)


def stories(folder: Path, rank: int) -> None:
    """What the tests below look at, in one process."""
    ranks.start_distributed()
    lines: dict[str, list] = {}

    def learn(name: str, iteration: int, attempt: str = "1-aa") -> None:
        said = update(Updates(folder / name, "bf16-zero2", ()), iteration, attempt)
        lines.setdefault(name, []).append(said)

    what_is_kept_and_dropped(folder, learn)
    replays_that_save(learn)
    torch.save(lines, folder / "lines.pt")


def what_is_kept_and_dropped(folder: Path, learn) -> None:
    from stages.ppo import kept

    # another attempt's update was committed, though with the same policy
    learn("taken back", 1)
    paths = load_run(folder / "taken back").paths
    shutil.rmtree(paths.task(policy_maker(1)).folder)
    left = kept._kept
    learn("taken back", 1, "2-bb")
    kept._kept = left
    learn("taken back", 2, "3-cc")
    kept.release()
    # a task failed
    learn("failed", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.ppo.update.save_policy", full)
        with pytest.raises(OSError, match="no space"):
            learn("failed", 2)
    kept.release()
    learn("failed", 2)
    # the process leaves, as planned
    learn("leaving", 1)
    learn("leaving", 2)
    assert kept.seconds_to_save() == 0.0, "none was written yet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.ppo.kept.read_record", full)
        kept.save()  # which ends nobody, nor leaves other ranks waiting
    kept.save()
    kept.save()
    assert kept.seconds_to_save() == 0.0, "it is saved"
    before = tensor_bytes()
    kept.release()
    assert tensor_bytes() < before / 4, "weights and moments are still in memory"
    learn("leaving", 3)
    assert kept.seconds_to_save() > 0.0
    kept.release()
    assert kept.seconds_to_save() == 0.0


def replays_that_save(learn) -> None:
    """Of one that takes long, and of one that is warned."""
    from stages.ppo import kept, resuming

    for name in ("slow", "warned"):
        for iteration in (1, 2):
            learn(name, iteration)
        kept.release()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resuming, "longest_replay", lambda config: 0.0)
        learn("slow", 3)
    kept.release()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resuming, "settle", warned(patch, resuming))
        learn("warned", 3)


def full(*_: object) -> None:
    raise OSError("no space left")


def warned(patch: pytest.MonkeyPatch, resuming: object):
    """Slurm's warning comes while the first iteration is learned again."""
    settle = resuming.settle

    def settled(*given):
        patch.setattr(resuming, "settle", settle)
        os.kill(os.getpid(), signal.SIGUSR2)
        return settle(*given)

    return settled


def tensor_bytes() -> int:
    gc.collect()
    found = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(storages.values())


@pytest.fixture(scope="module")
def told(scored, tmp_path_factory) -> tuple[Path, dict[str, list[list[str]]]]:
    folder = tmp_path_factory.mktemp("stories")
    for name in ("taken back", "failed", "leaving", "slow", "warned"):
        copied(scored["bf16-zero2", 1000], folder / name)
    assert by_ranks(1, folder / "meeting", stories, folder) == [0]
    return folder, torch.load(folder / "lines.pt")


def assert_same_policies(root: Path, expected: Path, last: int) -> None:
    ours, theirs = load_run(root).paths, load_run(expected).paths
    for version in range(1, last + 1):
        found, wanted = (read_record(paths, policy_maker(version)) for paths in (ours, theirs))
        assert found.fingerprint == wanted.fingerprint


def test_a_learner_whose_update_was_taken_back_is_dropped(told, loaded):
    folder, lines = told
    assert FROM_MEMORY not in "".join(lines["taken back"][-1])
    assert_same_policies(folder / "taken back", loaded[1, "bf16-zero2"], 2)


def test_nothing_is_kept_of_an_update_that_failed(told, loaded):
    folder, lines = told
    assert FROM_MEMORY not in "".join(lines["failed"][-1])
    assert_same_policies(folder / "failed", loaded[1, "bf16-zero2"], 2)


def test_a_process_that_leaves_saves_what_it_has_in_memory(told, loaded):
    folder, lines = told
    assert states_of(folder / "leaving") == [2]
    assert not any(word in "".join(lines["leaving"][-1]) for word in ("learned again", FROM_MEMORY))
    assert_same_policies(folder / "leaving", loaded[1, "bf16-zero2"], 3)
    ours, theirs = (load_run(root).paths for root in (folder / "leaving", loaded[1, "bf16-zero2"]))
    assert read_record(ours, state_of(2)).fingerprint == read_record(theirs, state_of(2)).fingerprint


@pytest.mark.parametrize(("name", "states"), [("slow", [1, 2]), ("warned", [1])])
def test_a_replay_saves_states_on_its_way_when_it_takes_long_or_is_warned(name, states, told, loaded):
    folder, lines = told
    assert states_of(folder / name) == states
    assert "".join(lines[name][-1]).count("learned again: its weights") == 2
    assert_same_policies(folder / name, loaded[1, "bf16-zero2"], 3)
    ours, theirs = (load_run(root).paths for root in (folder / name, loaded[1, "bf16-zero2"]))
    for version in states:
        assert read_record(ours, state_of(version)).fingerprint == (
            read_record(theirs, state_of(version)).fingerprint
        )


def test_a_warning_that_a_replay_heeds_is_one_for_its_worker_too():
    told = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: told.append(number))
    try:
        with warnings_noted() as is_warned:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert is_warned()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert told == [signal.SIGUSR2]
