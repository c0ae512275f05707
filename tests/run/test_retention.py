"""Thinning: what nobody needs goes, what somebody may need stays, and readers can tell thinned from lost."""

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.compose import from_mapping
from pipeline.config.issue import ConfigError
from pipeline.config.resolve import resolve
from pipeline.metrics.responses import read_samples
from pipeline.orchestrate.publish import Publisher
from pipeline.orchestrate.rewind import check_can_go_on, go_back, parse_point
from pipeline.run import journal
from pipeline.run.commits import CorruptData, check_sizes, read_record, require_record, verify_outputs
from pipeline.run.directory import Run, create_run, load_run, write_run
from pipeline.run.identity import Parent, RunError
from pipeline.run.plan import Plan, policy_maker, state_of
from pipeline.run.records import Frontier
from pipeline.run.retention import (
    Thinned,
    check_is_kept,
    in_words,
    is_kept,
    kept_versions,
    list_folders,
    thin,
    thinned_folders,
)
from pipeline.run.states import can_fork, can_go_on, oldest_needed, remove_unfinished, state_before
from pipeline.run.tasks import Stage
from pipeline.status.snapshot import read_status
from pipeline.tracking.tracker import Trackers
from stages.context import Context
from tests.support import tiny
from tests.support.committed import commit, commit_in_two
from tests.support.composed import composed_of
from tests.support.killing import killed_at
from tests.support.tables import LONG

plans = st.builds(
    lambda start, more, every: Plan(start + more, 2, every, start),
    st.integers(0, 7),
    st.integers(1, 12),
    st.integers(0, 10),
)


# --- a run without models ---


def make_run(root: Path, commits: int, start: int = 0, every: int = 0, **update: int | None) -> Run:
    """A run in which updates up to ``commits`` are committed, of small files.

    Args:
        start: the iteration that it was forked after; 0 if it is no fork.
        every: evaluate.every.
    """
    config = {
        "run_dir": str(root),
        "iterations": 60,
        "model": {"policy": "/policy"},
        "data": {"prompts": "/prompts", "prompts_per_iteration": 4},
        "reward": {"components": {"r": {"kind": "rule", "function": "a:b"}}},
        "update": update,
    }
    if every:
        config["data"]["heldout"] = "/heldout"
        config["evaluate"] = {"every": every}
    run = create_run(from_mapping(config))
    if start:
        run.paths.run_json.unlink()
        run = write_run(run.paths, run.config, "", Parent("abc", "/parent", start))
    for version in range(max(start, 1), commits + 1):
        commit(run, version)
    return run


def left(run: Run) -> dict[int, str]:
    """Version -> first letters of what is there of it."""
    return {v: "".join(sorted(f[0] for f in folders)) for v, folders in list_folders(run.paths).items()}


def call_best(run: Run, version: int) -> None:
    best = {"iteration": version, "reward": 0.5, "policy": f"policy/{version:05d}.1-ab"}
    run.paths.best.write_text(json.dumps(best))


# --- what stays ---


@given(plans, st.integers(2, 4), st.sampled_from([None, 1, 2, 5]), st.data())
def test_whatever_can_still_run_finds_what_it_reads_and_so_does_its_repetition(
    plan, keep_last, keep_every, data
):
    updated = data.draw(st.integers(max(plan.start, 1), plan.iterations))
    evaluated = data.draw(st.integers(0, sum(i <= updated for i in plan.evaluations())))
    evaluations = plan.evaluations()[evaluated:]
    rows = min([updated, *(i - 1 for i in evaluations if plan.start < i <= updated)])
    needed = {source for task in plan.window(updated, evaluated) for source in plan.inputs(task)}
    versions = {task.iteration for task in needed if task.stage is Stage.UPDATE}
    versions |= {version - 1 for version in versions if version > max(plan.start, 1)}  # to make them again
    assert all(is_kept(version, rows, keep_last, keep_every, evaluations) for version in versions)


def test_the_newest_and_every_so_manieth_stay_and_of_the_best_the_policy(tmp_path):
    run = make_run(tmp_path / "run", 9, keep_last=2, keep_every=3)
    call_best(run, 4)
    assert list(thin(run, 8)) == []
    assert left(run) == {3: "cpt", 4: "p", 6: "cpt", 7: "cpt", 8: "cpt", 9: "cpt"}
    assert sorted(path.name for path in run.paths.trainers.iterdir() if path.is_symlink()) == [
        f"{version:05d}" for version in (3, 6, 7, 8, 9)
    ]
    assert (run.paths.policies / "00004" / "weights").read_text() == "weights 4"
    assert kept_versions(run.paths) == [3, 6, 7, 8, 9]
    assert kept_versions(run.paths, ["policy"]) == [3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize(("settings", "kept"), [({}, (3, 4, 5)), ({"keep_last": None}, (1, 2, 3, 4, 5))])
def test_by_default_the_newest_three_stay_and_everything_if_told_so(tmp_path, settings, kept):
    run = make_run(tmp_path / "run", 5, **settings)
    assert list(thin(run, 5)) == []
    assert left(run) == dict.fromkeys(kept, "cpt")


def test_a_best_policy_that_is_surpassed_goes_at_the_next_look(tmp_path):
    run = make_run(tmp_path / "run", 6, keep_last=2)
    call_best(run, 2)
    list(thin(run, 5))
    call_best(run, 5)
    list(thin(run, 6))
    assert left(run) == {5: "cpt", 6: "cpt"}
    names = {folder.partition("/")[0] for folder in thinned_folders(run.paths, policy_maker(2))}
    assert names == {"critic", "policy", "trainer"}, "what went first is not forgotten"
    assert sum(event["event"] == "thinned" for event in journal.read(run.paths.events)) == 5


def test_an_attempt_at_the_next_update_is_left_alone(tmp_path):
    run = make_run(tmp_path / "run", 5, keep_last=2)
    begun = run.paths.task(policy_maker(6)).trainer("1-cd")
    begun.mkdir()
    list(thin(run, 5))
    assert begun.is_dir()


def test_a_look_costs_the_same_however_long_the_run_is(tmp_path, monkeypatch):
    runs = [make_run(tmp_path / f"run-{size}", size, keep_last=3) for size in (5, 40)]
    for run, size in zip(runs, (5, 40), strict=True):
        list(thin(run, size - 1))
    seen: list[int] = []
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: seen.append(1) or listed(path))
    counts = []
    for run, size in zip(runs, (5, 40), strict=True):
        seen.clear()
        list(thin(run, size))
        counts.append(len(seen))
    assert len(set(counts)) == 1


def test_a_fork_s_first_policy_stays_until_it_is_evaluated(tmp_path):
    """No row waits for that evaluation: the iteration belongs to the parent."""
    run = make_run(tmp_path / "run", 8, start=5, every=10, keep_last=2)
    journal.append(run.paths.metrics, *({"iteration": i} for i in (6, 7, 8)))
    books = Publisher(run, Trackers())
    books.open()
    assert list(books.thin(8, Frontier(8, 0))) == []
    assert left(run) == dict.fromkeys((5, 7, 8), "cpt")
    assert list(books.thin(8, Frontier(8, 1))) == []
    assert left(run) == dict.fromkeys((7, 8), "cpt")


# --- killed anywhere ---


@pytest.mark.parametrize("steps", range(1, 16))
def test_thinning_that_is_killed_anywhere_is_taken_up_again(tmp_path, steps):
    undisturbed = make_run(tmp_path / "undisturbed", 4, keep_last=2)
    list(thin(undisturbed, 4))
    run = make_run(tmp_path / "run", 4, keep_last=2)
    is_killed, _ = killed_at(steps, ("unlink", "rmdir", "fsync"), lambda: thin(run, 4))
    assert is_killed
    for version in (1, 2, 3, 4):
        check_sizes(run.paths, require_record(run.paths, policy_maker(version)))
    list(thin(run, 4))
    assert left(run) == left(undisturbed) == {3: "cpt", 4: "cpt"}
    for version in (1, 2):
        marker = run.paths.task(policy_maker(version)).thinned
        assert len(json.loads(marker.read_text())["folders"]) == 3


def test_what_cannot_be_removed_is_said_and_tried_again(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", 3, keep_last=2)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **_kw: (_ for _ in ()).throw(OSError(39, "not empty")))
        (said,) = thin(run, 3)
    assert "trainer/00001.1-ab" in said
    assert "not empty" in said
    list(thin(run, 3))
    assert left(run) == {2: "cpt", 3: "cpt"}


# --- thinned is not lost ---


def test_what_was_thinned_still_counts_as_committed(tmp_path):
    run = make_run(tmp_path / "run", 4, keep_last=2)
    list(thin(run, 4))
    verify_outputs(run.paths, require_record(run.paths, policy_maker(1)))


def test_what_is_lost_does_not_although_something_else_was_thinned(tmp_path):
    run = make_run(tmp_path / "run", 5, keep_last=2)
    call_best(run, 2)
    list(thin(run, 5))
    (run.paths.policies / "00002.1-ab" / "weights").unlink()
    shutil.rmtree(run.paths.trainers / "00004.1-ab")
    for version, name in ((2, "policy/00002.1-ab/weights"), (4, "trainer/00004.1-ab/part/more")):
        with pytest.raises(CorruptData, match=f"{name} is gone"):
            check_sizes(run.paths, require_record(run.paths, policy_maker(version)))


def test_a_marker_speaks_of_its_own_attempt_only(tmp_path):
    """After going back, a repeated update is not thinned because the one before was."""
    run = make_run(tmp_path / "run", 4, keep_last=2)
    list(thin(run, 4))
    files = run.paths.task(policy_maker(1))
    files.record.unlink()
    commit(run, 1, "2-cd")
    shutil.rmtree(files.trainer("2-cd"))
    with pytest.raises(CorruptData, match="is gone"):
        check_sizes(run.paths, require_record(run.paths, policy_maker(1)))


def test_a_marker_that_cannot_be_read_is_named(tmp_path):
    run = make_run(tmp_path / "run", 3, keep_last=2)
    marker = run.paths.task(policy_maker(1)).thinned
    marker.write_text("{")
    with pytest.raises(CorruptData, match=r"shard-00000.thinned.json cannot be read"):
        check_sizes(run.paths, require_record(run.paths, policy_maker(1)))


def test_who_needs_what_was_thinned_is_told_where_to_go_back_to(tmp_path):
    run = make_run(tmp_path / "run", 7, keep_last=2, keep_every=3)
    list(thin(run, 7))
    record = read_record(run.paths, policy_maker(5))
    with pytest.raises(Thinned, match=r"iteration 5 was pruned .*go back to iteration 1, 4, 7, 8: .*--from"):
        check_is_kept(run.paths, record, "trainer")


@pytest.mark.parametrize(
    ("numbers", "said"), [([], ""), ([3], "3"), ([3, 4], "3, 4"), ([1, 4, 5, 6, 9], "1, 4 to 6, 9")]
)
def test_numbers_in_words(numbers, said):
    assert in_words(numbers) == said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("update.keep_last=1", "keep_last=1: .*made again from the one before"),
        ("update.keep_every=5", "keep_every=5: .*give update.keep_last"),
    ],
)
def test_what_cannot_be_kept_like_that_is_refused(inputs, tmp_path, given, said):
    with pytest.raises(ConfigError, match=said):
        resolve(composed_of(inputs, tmp_path / "run", given))


# --- the best of what is left ---


def test_once_the_best_is_taken_back_the_best_that_is_left_takes_its_place(tmp_path):
    run = make_run(tmp_path / "run", 6, keep_last=2, keep_every=2)
    rewards = {1: 5.0, 2: 1.0, 3: 4.0, 4: 2.0, 5: 9.0, 6: 0.0}
    rows = [{"iteration": i, "policy_version": i, "evaluate/reward": r} for i, r in rewards.items()]
    journal.append(run.paths.metrics, *rows)
    books = Publisher(run, Trackers())
    books.open()
    assert list(books.thin(6, Frontier(6, 0))) == []
    assert left(run) == {2: "cpt", 4: "cpt", 5: "cpt", 6: "cpt"}
    assert json.loads(run.paths.best.read_text())["iteration"] == 5
    journal.rewrite(run.paths.metrics, rows[:4])
    run.paths.best.unlink()
    Publisher(run, Trackers()).open()
    assert json.loads(run.paths.best.read_text())["iteration"] == 4


# --- a run with models ---


@pytest.fixture(scope="module")
def thinned_run(inputs, slurm_ppo, tmp_path_factory) -> Path:
    """Five iterations, of which 2, 4 and 5 are kept, and the policy of 3 if it is the best; the shards of 4
    and 5 are files."""
    run_dir = tmp_path_factory.mktemp("thinned") / "run"
    more = ["iterations=5", "update.keep_last=2", "update.keep_every=2", "evaluate.every=2"]
    more.append("update.keep_shards_last=2")
    done = slurm_ppo(
        "run", *tiny.overrides(inputs, run_dir, f"data.heldout={inputs / 'heldout.jsonl'}", *more)
    )
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.fixture
def copied_run(thinned_run, tmp_path) -> Path:
    return Path(shutil.copytree(thinned_run, tmp_path / "run", symlinks=True))


def policy(run: Path) -> bytes:
    return (run / "policy" / "00005" / "model.safetensors").read_bytes()


def spoil(run: Path, *versions: int) -> None:
    """Cut policies short; the last one is still to be evaluated, so somebody will look."""
    for version in versions:
        (run / "policy" / f"{version:05d}" / "model.safetensors").write_bytes(b"")
    (run / "iterations/00005/evaluate/shard-00000.json").unlink()


def test_a_thinned_run_is_complete_and_every_command_knows_it(thinned_run, slurm_ppo):
    assert left(load_run(thinned_run)) == {2: "ps", 4: "ps", 5: "ps"}
    status = read_status(load_run(thinned_run))
    assert (status.state, status.kept) == ("complete", (2, 4, 5))
    kept = f"kept: iteration 2, 4, 5, and the best policy ({status.best})\n"
    assert kept in slurm_ppo("status", thinned_run).stdout
    assert "nothing to do: every task is committed" in slurm_ppo("plan", thinned_run).stdout


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("update@4", r"iteration 3 was pruned on purpose .* go back to iteration 1, 3, 5: .*resume"),
        ("rollout@2", r"iteration 1 was pruned"),
    ],
)
def test_one_cannot_go_back_to_where_the_state_is_thinned(copied_run, point, said):
    before = sorted(copied_run.rglob("*"))
    with pytest.raises(RunError, match=said):
        go_back(load_run(copied_run), parse_point(point))
    assert [path for path in sorted(copied_run.rglob("*")) if path not in before] == [
        path for path in sorted(copied_run.rglob("*")) if "locks" in path.parts and path not in before
    ]


def test_going_back_across_thinned_iterations_ends_in_the_same_policy(copied_run, thinned_run, slurm_ppo):
    done = slurm_ppo("resume", copied_run, "--from", "rollout@3")
    assert done.returncode == 0, done.stderr
    assert policy(copied_run) == policy(thinned_run)
    assert left(load_run(copied_run)) == left(load_run(thinned_run))


def test_going_back_into_a_packed_iteration_ends_in_the_same_policy(copied_run, thinned_run, slurm_ppo):
    packed = [path.parts[-3] for path in sorted(copied_run.glob("iterations/*/update/shards.zip"))]
    assert packed == ["00001", "00002", "00003"]
    assert not list(copied_run.glob("iterations/0000[123]/rollout"))
    done = slurm_ppo("resume", copied_run, "--from", "update@3")
    assert done.returncode == 0, done.stderr
    assert policy(copied_run) == policy(thinned_run)
    again = [e["task"] for e in journal.read(copied_run / "events.jsonl") if e["event"] == "launched"]
    assert again.count("3/update/0") == 2
    assert again.count("3/rollout/0") == again.count("3/reward/1") == 1
    left_there = sorted(path.name for path in copied_run.glob("iterations/00003/*"))
    assert left_there == ["state", "update"]


def test_a_report_and_a_fork_read_a_packed_run(copied_run, thinned_run, tmp_path, slurm_ppo):
    shown = json.loads(slurm_ppo("status", copied_run, "--json").stdout)
    assert (shown["state"], shown["rows_missing"]) == ("complete", 0)
    assert read_samples(load_run(copied_run), 1).rows
    done = slurm_ppo("report", copied_run)
    assert done.returncode == 0, done.stderr
    words = (
        "iterations=5",
        "update.keep_last=null",
        "update.keep_every=null",
        "update.keep_shards_last=null",
    )
    done = slurm_ppo("fork", f"{copied_run}@4", tmp_path / "fork", *words)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(copied_run)
    done = slurm_ppo("resume", tmp_path / "fork")
    assert done.returncode == 0, done.stderr
    assert policy(tmp_path / "fork") == policy(thinned_run)
    again = slurm_ppo("resume", tmp_path / "fork")
    assert "the run is trained; hashing policy 5" in again.stderr
    said = slurm_ppo("logs", thinned_run, "rollout@1").stdout
    assert "==> rollout@1 0: " in said
    assert "shard-00000.log (packed)\n" in said


def test_a_newest_policy_that_is_lost_is_made_again(copied_run, thinned_run, slurm_ppo):
    spoil(copied_run, 5)
    done = slurm_ppo("resume", copied_run)
    assert done.returncode == 0, done.stderr
    assert "iteration 5 update is corrupt" in done.stderr
    assert policy(copied_run) == policy(thinned_run)


def test_where_what_it_would_be_made_from_is_thinned_the_run_goes_on_from_what_is_kept(
    copied_run, thinned_run, slurm_ppo
):
    spoil(copied_run, 4, 5)
    done = slurm_ppo("resume", copied_run)
    assert done.returncode == 0, done.stderr
    assert "; the newest from which the run can go on is 2" in done.stderr
    assert policy(copied_run) == policy(thinned_run)


# --- states that are committed behind their policies ---


def commit_up_to(run: Run, versions: int, *lost: int) -> Run:
    for version in range(1, versions + 1):
        commit_in_two(run, version, is_lost=version in lost)
    return run


def test_states_go_as_policies_do_and_each_marker_is_beside_its_own_record(tmp_path):
    run = commit_up_to(make_run(tmp_path / "run", 0, keep_last=2), 5)
    call_best(run, 2)
    assert list(thin(run, 5)) == []
    assert left(run) == {2: "p", 4: "ps", 5: "ps"}
    assert thinned_folders(run.paths, state_of(2)) == {"state/00002.1-ab"}
    assert thinned_folders(run.paths, policy_maker(2)) == set()
    assert kept_versions(run.paths) == [4, 5]
    assert not (run.paths.states / "00002").is_symlink()
    assert list(thin(run, 5)) == [], "and again there is nothing to do"


@pytest.mark.parametrize(
    ("lost", "kept"),
    [
        ((6,), {4: "ps", 5: "ps", 6: "p"}),
        ((5, 6), {3: "ps", 4: "ps", 5: "p", 6: "p"}),
        ((3, 5, 6), {2: "ps", 3: "p", 4: "ps", 5: "p", 6: "p"}),
        ((2, 3, 4, 5, 6), {v: "ps" if v == 1 else "p" for v in range(1, 7)}),
        ((1, 2, 3, 4, 5, 6), dict.fromkeys(range(1, 7), "p")),
    ],
)
def test_the_newest_two_states_stay_and_every_policy_after_the_older(tmp_path, lost, kept):
    """Were the newest lost too, the run would be learnt again from the one before it."""
    run = commit_up_to(make_run(tmp_path / "run", 0, keep_last=2), 6, *lost)
    assert list(thin(run, 6)) == []
    assert left(run) == kept


def newest_state(run: Run, version: int) -> int:
    """Version of the state that the next update begins with."""
    return Context(run.paths, run.config, policy_maker(version + 1), "1-ab").newest_state(version)


@pytest.mark.parametrize("is_at_once", [False, True])
def test_a_best_policy_whose_state_was_thinned_is_learnt_towards_from_the_state_before(tmp_path, is_at_once):
    run = make_run(tmp_path / "run", 0, keep_last=2, keep_every=5)
    for version in range(1, 13):
        commit(run, version) if is_at_once else commit_in_two(run, version)
    call_best(run, 6)
    assert list(thin(run, 12)) == []
    whole = "cpt" if is_at_once else "ps"
    assert left(run) == {5: whole, 6: "p", 10: whole, 11: whole, 12: whole}
    if not is_at_once:  # else it is refused, as what an update commits at once is needed whole
        check_can_go_on(run, 6)
    assert [newest_state(run, version) for version in (5, 6, 10)] == [5, 5, 10]


def test_a_record_of_a_state_that_cannot_be_read_is_named_so_that_it_is_moved_aside(tmp_path):
    run = commit_up_to(make_run(tmp_path / "run", 0), 3)
    run.paths.task(state_of(3)).record.write_text("{")
    assert not can_fork(run.paths, 3)
    with pytest.raises(CorruptData) as caught:
        newest_state(run, 3)
    assert caught.value.task == state_of(3)


@LONG
@given(st.sets(st.integers(1, 12)), st.integers(2, 4), st.sampled_from([None, 3]))
@settings(max_examples=25)
def test_whatever_is_lost_the_next_update_can_begin_with_what_stays(lost, keep_last, keep_every):
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run", 0, keep_last=keep_last, keep_every=keep_every)
        for version in range(1, 13):
            commit_in_two(run, version, is_lost=version in lost)
            list(thin(run, version))
            assert can_go_on(run.plan, run.paths, version)
            assert can_go_on(run.plan, run.paths, version - 1), "nor is the run lost if this update is"
            assert newest_state(run, version) == state_before(run.plan, run.paths, version)


@pytest.mark.parametrize("every", [2, 3, 1000])
def test_where_states_are_rare_policies_and_shards_stay_that_make_the_others(tmp_path, every):
    run = make_run(tmp_path / "run", 0, keep_last=2)
    for version in range(1, 8):
        commit_in_two(run, version, is_due=version % every == 0)
        list(thin(run, version))
        assert can_go_on(run.plan, run.paths, version)
        assert can_fork(run.paths, version) is (version % every == 0)
    oldest = {2: 4, 3: 3, 1000: 0}[every]
    assert oldest_needed(run.plan, run.paths, 7) == oldest, "what is packed is not newer than that"
    expected = {v: "ps" if v % every == 0 else "p" for v in range(max(oldest, 1), 8)}
    assert left(run) == expected


def test_shards_that_a_state_might_be_made_again_from_are_not_packed(tmp_path):
    run = commit_up_to(make_run(tmp_path / "run", 0), 9, 7, 8, 9)
    assert oldest_needed(run.plan, run.paths, 9) == 5
    at_once = make_run(tmp_path / "at_once", 9)
    assert oldest_needed(at_once.plan, at_once.paths, 9) == 8


def test_a_trainer_that_keeps_no_state_holds_nothing_back(tmp_path):
    run = make_run(tmp_path / "run", 0, keep_last=2)
    for version in range(1, 6):
        commit_in_two(run, version, is_lost=True)
        path = run.paths.task(policy_maker(version)).record
        record = replace(read_record(run.paths, policy_maker(version)), promises_state=False)
        path.write_text(json.dumps(record.to_json()))
    list(thin(run, 5))
    assert left(run) == {4: "p", 5: "p"}
    assert can_go_on(run.plan, run.paths, 5)
    assert can_fork(run.paths, 5)


def test_going_back_where_there_is_no_state_says_which_iterations_have_one(tmp_path):
    """Policies before a lost state were pruned by an earlier program, say: nothing can make it again."""
    run = commit_up_to(make_run(tmp_path / "run", 0), 6, 3)
    shutil.rmtree(run.paths.root / "state/00002.1-ab")
    run.paths.task(state_of(2)).record.unlink()
    run.paths.task(policy_maker(2)).thinned.write_text('{"folders": ["policy/00002.1-ab"]}')
    with pytest.raises(RunError) as caught:
        check_can_go_on(run, 3)
    said = str(caught.value)
    assert said.startswith(
        "iteration 3 has no trainer's state, nor has any from which it could be learned again"
    )
    assert "iteration 1, 4 to 6 have one; one can go back to iteration 1, 2, 5 to 7" in said


def test_what_a_killed_attempt_wrote_of_a_state_is_removed_and_a_committed_one_is_not(tmp_path):
    run = commit_up_to(make_run(tmp_path / "run", 0), 3, 2)
    for version in (2, 3):
        (run.paths.states / f"{version:05d}.2-cd").mkdir()
        private = run.paths.task(state_of(version)).folder / ".shard-00000.json.4711.ab"
        private.parent.mkdir(parents=True, exist_ok=True)
        private.touch()
        remove_unfinished(run.paths, version)
        assert not private.exists()
    left_there = sorted(path.name for path in run.paths.states.iterdir())
    assert left_there == ["00001", "00001.1-ab", "00003", "00003.1-ab"]
