"""Going back: what a later point supersedes is moved aside, nothing is lost, and the run ends the same."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.executors.slurm.arrays import stage_submissions
from pipeline.orchestrate.publish import Publisher
from pipeline.orchestrate.rewind import Point, go_back, parse_point, superseded
from pipeline.run import journal
from pipeline.run.commits import opened_history, read_record
from pipeline.run.directory import load_run
from pipeline.run.identity import RunError
from pipeline.run.lease import LeaseHeld, hold
from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan, policy_maker, state_of
from pipeline.run.records import Records, find_frontier
from pipeline.run.submissions import Ledger
from pipeline.run.superseded import move_aside
from pipeline.run.tasks import PREPARE, Stage, Task, task_key
from pipeline.status.snapshot import read_status
from pipeline.tracking.state import Sent, published
from pipeline.tracking.tracker import Trackers
from stages.context import Context
from stages.training import publish_state
from tests.support import processes
from tests.support.damage import flip_bit
from tests.support.waiting import wait_for

STAGES = [Stage.ROLLOUT, Stage.REWARD, Stage.UPDATE, Stage.EVALUATE]
plans = st.builds(
    Plan, st.integers(1, 6), st.integers(1, 3), st.integers(0, 4), pools=st.sampled_from([(), ("big", "b_2")])
)


def data_files(root: Path) -> dict[str, bytes]:
    """Files by their place in the run, also those that were moved aside; journals and links left out."""
    found = {}
    for path in root.rglob("*"):
        parts = path.relative_to(root).parts
        if path.is_file() and not path.is_symlink() and "locks" not in parts:
            parts = parts[2:] if parts[0] == "superseded" else parts
            if parts[-1] not in ("metrics.jsonl", "spans.jsonl", "events.jsonl", "best.json"):
                found["/".join(parts)] = path.read_bytes()
    return found


def policy_bytes(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "policy" / "00002").iterdir()}


def test_a_run_whose_prompts_were_taken_back_says_so_and_not_that_it_has_just_begun(copied_run):
    run = load_run(copied_run)
    move_aside(run.paths, [PREPARE], "corrupt")
    with pytest.raises(RunError, match="the prompts are to be prepared again before"):
        go_back(run, Point(Stage.ROLLOUT, 2))


@given(plans, st.data())
def test_what_is_superseded_is_all_that_depends_on_the_point(plan, data):
    points = [Point(stage, None) for stage in STAGES[:3]]
    points += [Point(Stage.SCORE, None, pool) for pool in ("", *plan.pools) if plan.pools]
    point = data.draw(st.sampled_from(points))
    at_hand = data.draw(st.integers(1, plan.iterations))
    iteration = data.draw(st.integers(1, at_hand))
    tasks = superseded(plan, replace(point, iteration=iteration), at_hand)
    taken = {
        task
        for task in plan.all_tasks()
        if (task.iteration, task.stage) == (iteration, point.stage) and point.pool in ("", task.pool)
    }
    for task in plan.all_tasks():  # in an order in which inputs come first
        if task.iteration <= at_hand and any(source in taken for source in plan.inputs(task)):
            taken.add(task)
    assert taken <= set(tasks)
    assert all(task.iteration >= iteration for task in tasks)
    mine = {task.pool for task in tasks if (task.iteration, task.stage) == (iteration, Stage.SCORE)}
    assert mine <= ({point.pool} if point.pool else set(plan.pools))
    assert len(set(tasks)) == len(tasks)
    order = {task: number for number, task in enumerate(plan.all_tasks())}
    planned = [order[task] for task in tasks if task.stage is not Stage.STATE]
    assert planned == sorted(planned, reverse=True)
    before = {after: task for task, after in itertools.pairwise(tasks)}
    assert all(before[task] == state_of(task.iteration) for task in tasks if task.stage is Stage.UPDATE)


@given(plans, st.data())
def test_going_back_to_an_evaluation_takes_back_evaluations_only(plan, data):
    iteration = data.draw(st.integers(0, plan.iterations))
    tasks = superseded(plan, Point(Stage.EVALUATE, iteration), plan.iterations)
    assert {task.iteration for task in tasks} == {i for i in plan.evaluations() if i >= iteration}
    assert {task.stage for task in tasks} <= {Stage.EVALUATE}


@pytest.mark.parametrize(
    "point", ["rollout", "rollout@1", "reward@2", "update@1", "evaluate@2", "evaluate@0"]
)
def test_everything_is_moved_nothing_is_lost_and_the_rows_are_trimmed(copied_run, point):
    before = data_files(copied_run)
    rows = journal.read(copied_run / "metrics.jsonl")
    parsed = parse_point(point)
    iteration = 2 if parsed.iteration is None else parsed.iteration
    folder = go_back(load_run(copied_run), parsed)
    assert data_files(copied_run) == before
    kept = [row for row in rows if row["iteration"] < iteration]
    assert journal.read(copied_run / "metrics.jsonl") == kept
    assert journal.read(folder / "metrics.jsonl") == rows
    status = read_status(load_run(copied_run))
    assert status.state == "incomplete"
    assert status.iterations_done == (2 if parsed.stage is Stage.EVALUATE else iteration - 1)
    links = [path for path in copied_run.rglob("*") if path.is_symlink()]
    assert [path for path in links if not path.exists()] == []
    best = copied_run / "best.json"
    if kept:
        assert json.loads(best.read_text())["iteration"] in {row["iteration"] for row in kept}
        assert (copied_run / "policy" / "best").exists()
    else:
        assert not best.exists()


def test_not_to_what_follows_an_update_whose_record_is_spoilt_but_to_that_update(copied_run, slurm_ppo):
    before = policy_bytes(copied_run)
    flip_bit(RunPaths(copied_run).task(policy_maker(1)).record)
    refused = slurm_ppo("resume", copied_run, "--from", "update@2")
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert "iteration 1 update is corrupt" in refused.stderr
    assert "--from update@1" in refused.stderr
    done = slurm_ppo("resume", copied_run, "--from", "update@1")
    assert done.returncode == 0, done.stderr
    assert policy_bytes(copied_run) == before


def test_rows_that_are_taken_back_are_taken_back_from_wandb_too(copied_run):
    """By the rows alone: W&B's state no longer fits them, so that a new W&B run gets all."""
    sent = Sent().with_sent(published(load_run(copied_run)))
    go_back(load_run(copied_run), parse_point("update@2"))
    assert not sent.holds(published(load_run(copied_run)))


def test_going_back_twice_finds_nothing_the_second_time(copied_run):
    assert go_back(load_run(copied_run), parse_point("update@2")) is not None
    assert go_back(load_run(copied_run), parse_point("update@2")) is None


def test_going_back_that_was_cut_short_after_the_rows_heals(copied_run, slurm_ppo):
    """Rows go first: what is missing of them is written again from the commit records."""
    rows = journal.read(copied_run / "metrics.jsonl")
    journal.rewrite(copied_run / "metrics.jsonl", rows[:1])
    assert slurm_ppo("resume", copied_run).returncode == 0
    assert [row["iteration"] for row in journal.read(copied_run / "metrics.jsonl")] == [1, 2]


def test_who_follows_the_rows_is_told_of_each_as_it_is_written(copied_run):
    """Else W&B would see a run's rows when its driver ends."""
    run = load_run(copied_run)
    journal.rewrite(run.paths.metrics, [])
    shutil.rmtree(run.paths.rows)
    seen = []

    class Tracker(Trackers):
        def update(self) -> None:
            seen.append(len(journal.read(run.paths.metrics)))

    books = Publisher(run, Tracker())

    books.open()
    assert len(list(books.write_rows(Records(run.paths), find_frontier(run.plan, run.paths), print))) == 2
    assert seen == [0, 1, 2]


def test_not_while_a_driver_is_at_work(copied_run):
    with hold(copied_run / "locks"), pytest.raises(LeaseHeld):
        go_back(load_run(copied_run), parse_point("rollout@1"))
    assert not (copied_run / "superseded").exists()


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("rolout", "no stage 'rolout'.*rollout, reward, update, evaluate"),
        ("prepare", "no stage 'prepare'"),
        ("rollout@0", "'0' is not an iteration; they count from 1"),
        ("rollout@x", "'x' is not an iteration"),
        ("rollout@-1", "'-1' is not an iteration"),
        ("rollout@3", "has come to iteration 2, so it cannot go back to 3"),
        ("", "no stage ''"),
    ],
)
def test_points_that_are_none(copied_run, slurm_ppo, point, said):
    before = data_files(copied_run)
    with pytest.raises(RunError, match=said):
        go_back(load_run(copied_run), parse_point(point))
    assert data_files(copied_run) == before


# --- an attempt belongs to the history that it was started in ---


def test_what_a_late_attempt_commits_goes_with_what_was_taken_back(
    copied_run, slurm_ppo, tmp_path, monkeypatch
):
    """As of a node that was cut off when its job was cancelled: the run must not go on from old data."""
    run, policy = load_run(copied_run), policy_bytes(copied_run)
    go_back(run, parse_point("update@2"))
    monkeypatch.setenv("LIGHT_SECONDS", "4")
    late = processes.start_stage(processes.stage_arguments(run, "update", 2), tmp_path / "late.log")
    update = copied_run / "iterations/00002/update"
    log = tmp_path / "late.log"
    wait_for(lambda: log.exists() and "read 8 responses" in log.read_text(), "the attempt")
    folder = go_back(run, parse_point("rollout@2"))
    late.join(timeout=60)
    assert late.exitcode == 0
    assert "the run has gone back meanwhile" in (tmp_path / "late.log").read_text()
    assert (folder / "iterations/00002/update/shard-00000.json").exists()
    assert not (update / "shard-00000.json").exists()
    monkeypatch.delenv("LIGHT_SECONDS")
    assert slurm_ppo("resume", copied_run).returncode == 0
    assert policy_bytes(copied_run) == policy
    assert len(list((copied_run / "policy").glob("00002.*"))) == 1
    assert len(list(update.glob("shard-00000.learned.*"))) == 1, "what the late one wrote is removed"


def test_what_runs_ahead_of_the_point_is_moved_aside_too(copied_run):
    """A lost driver's jobs may have begun iterations of which nothing is committed."""
    run = load_run(copied_run)
    go_back(run, parse_point("update@1"))
    begun = copied_run / "iterations/00002/rollout/shard-00000.partial.1-a.json"
    begun.parent.mkdir(parents=True, exist_ok=True)
    begun.write_text("{}")
    reward = copied_run / "iterations/00002/reward"
    shutil.copytree(copied_run / "iterations/00001/reward", reward, dirs_exist_ok=True)
    folder = go_back(run, parse_point("reward@1"))
    assert not begun.exists()
    assert (folder / "iterations/00002/rollout" / begun.name).exists()


def test_what_stands_behind_a_gap_does_not_count(tmp_path):
    """An update was taken back, and a later one committed since: halving may pass over the gap."""
    plan, paths = Plan(6, 1, 0), RunPaths(tmp_path)
    for task in (PREPARE, *(Task(iteration, Stage.UPDATE) for iteration in (1, 2, 4))):
        paths.task(task).folder.mkdir(parents=True)
        paths.task(task).record.write_text("{}")
    assert find_frontier(plan, paths).updated == 2
    journal.append(paths.metrics, *({"iteration": iteration} for iteration in (1, 2, 3)))
    assert find_frontier(plan, paths).updated == 4, (
        "its row says that the update was there: its record is lost"
    )


def forge_input(run: Path, task: Task, source: Task) -> None:
    """As if the task had been computed from something else."""
    paths = RunPaths(run)
    record = read_record(paths, task)
    forged = replace(record, inputs={**record.inputs, task_key(source): "0" * 32})
    paths.task(task).record.write_text(json.dumps(forged.to_json()))


def test_an_update_made_from_what_is_not_there_any_more_is_made_again(copied_run, slurm_ppo):
    policy = policy_bytes(copied_run)
    forge_input(copied_run, Task(2, Stage.UPDATE), Task(1, Stage.UPDATE))
    done = slurm_ppo("resume", copied_run)
    assert done.returncode == 0, done.stderr
    assert "iteration 2 update was made from another iteration 1 update than there is" in done.stderr
    assert policy_bytes(copied_run) == policy
    assert [row["iteration"] for row in journal.read(copied_run / "metrics.jsonl")] == [1, 2]


def test_nor_is_it_passed_over_when_the_run_comes_to_it(copied_run, slurm_ppo):
    """It was committed before an update that had to be made again."""
    policy = policy_bytes(copied_run)
    forge_input(copied_run, Task(2, Stage.UPDATE), Task(2, Stage.REWARD))
    (copied_run / "metrics.jsonl").unlink()
    shutil.rmtree(copied_run / "rows")
    (copied_run / "iterations/00001/update/shard-00000.json").unlink()
    done = slurm_ppo("resume", copied_run)
    assert done.returncode == 0, done.stderr
    assert "its input iteration 2 reward shard 0 has changed since" in done.stderr
    assert policy_bytes(copied_run) == policy


def test_a_last_policy_that_is_damaged_is_seen_and_made_again(copied_run, slurm_ppo):
    """No task of the run will read it."""
    policy = policy_bytes(copied_run)
    flip_bit(copied_run / "policy/00002/model.safetensors")
    seen = slurm_ppo("doctor", copied_run)
    assert seen.returncode == 1
    assert "last policy" in seen.stdout
    assert "made again" in " ".join(seen.stdout.split())
    done = slurm_ppo("resume", copied_run)
    assert done.returncode == 0, done.stderr
    assert "iteration 2 update is corrupt" in done.stderr
    assert policy_bytes(copied_run) == policy


def test_jobs_whose_results_were_taken_back_have_not_failed(copied_run):
    run = load_run(copied_run)
    ledger = Ledger(run.paths)
    for iteration in (1, 2):
        (made,) = stage_submissions(run, 1, 1, [Task(iteration, Stage.UPDATE)], 1000)
        ledger.begin(made)
    go_back(run, parse_point("update@2"))
    assert [s.state.is_withdrawn for s in ledger.load([1, 2])] == [False, True]


# --- a state that is being written ---


@pytest.fixture
def writing(copied_run):
    """The last update, its state's files, and how its attempt publishes them."""
    run = load_run(copied_run)
    update, state = (read_record(run.paths, task) for task in (policy_maker(2), state_of(2)))
    run.paths.task(state.task).record.unlink()
    context = Context(run.paths, run.config, update.task, update.attempt)
    return run, lambda history: publish_state(context, update, state.outputs, 0.0, history)


def test_a_state_that_is_written_while_the_run_goes_back_lands_with_what_was_moved_aside(writing):
    run, publish = writing
    record = run.paths.task(state_of(2)).record
    with opened_history(run.paths, state_of(2)) as history:
        folder = go_back(run, parse_point("update@2"))
        assert "committed with what was moved aside" in publish(history)
    assert not record.exists()
    assert (folder / run.paths.relative(record)).exists()
    assert list(folder.glob("state/00002.*"))
    assert not list(run.paths.states.glob("00002*"))


def test_a_state_whose_policy_was_taken_back_meanwhile_is_not_kept(writing):
    run, publish = writing
    with opened_history(run.paths, state_of(2)) as history:
        run.paths.task(policy_maker(2)).record.unlink()
        assert "was retracted meanwhile" in publish(history)
    assert not run.paths.task(state_of(2)).record.exists()
    assert not list(run.paths.states.glob("00002.*"))


def test_with_an_update_its_state_is_moved_aside(copied_run):
    run = load_run(copied_run)
    folder = move_aside(run.paths, [policy_maker(2)], "2-update-0")
    assert (folder / "iterations/00002/state/shard-00000.json").exists()
    assert list(folder.glob("state/00002.*/critic/model.safetensors"))
    assert not list(run.paths.states.glob("00002*"))
    assert len(list(run.paths.states.glob("00001*"))) == 2
