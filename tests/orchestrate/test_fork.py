"""Forks: a new run goes on from a policy of another one, exactly, or with settings of its own."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.noop import make_record
from pipeline.config.algorithm import Estimator
from pipeline.config.issue import ConfigError
from pipeline.decide.reconcile import Observation, reconcile
from pipeline.orchestrate.fork import find_parent, fork, fork_config
from pipeline.orchestrate.rewind import go_back, parse_point
from pipeline.report import read_rows, write_report
from pipeline.run import journal
from pipeline.run.commits import publish, require_record
from pipeline.run.directory import Run, load_run, write_run
from pipeline.run.failures import FailureKind
from pipeline.run.identity import Parent, RunError, identity_text
from pipeline.run.plan import Plan, policy_maker, state_of
from pipeline.run.records import Frontier, find_frontier
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.run.wandb_place import WandbPlace
from pipeline.status.snapshot import read_status
from pipeline.tracking.state import Sent, published, write_state
from pipeline.tracking.tracker import behind
from tests.support import processes, tiny
from tests.support.committed import commit
from tests.support.toyworld import Luck, World, make_world

SECTIONS = ("policy", "state")
forks = st.builds(
    lambda start, more, shards, every, pools: Plan(start + more, shards, every, start, pools),
    st.integers(1, 7),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 5),
    st.sampled_from([(), ("big", "b_2")]),
)

# --- the plan of a fork ---


@given(forks)
def test_a_fork_has_the_later_tasks_of_its_parent_and_prepares_anew(plan):
    fresh = replace(plan, start=0)
    later = {task for task in fresh.all_tasks() if task.iteration > plan.start}
    first = {Task(plan.start, Stage.EVALUATE)} if plan.evaluate_every else set()
    assert set(plan.all_tasks()) == {PREPARE} | later | first
    assert len(list(plan.all_tasks())) == len(set(plan.all_tasks()))


@given(forks)
def test_what_a_fork_reads_is_made_before_or_was_given(plan):
    seen = {task for task in [Task(plan.start, Stage.UPDATE)] if plan.is_given(task)}
    assert len(seen) == 1
    for task in plan.all_tasks():
        assert not plan.is_given(task)
        assert set(plan.inputs(task)) <= seen
        seen.add(task)


@given(forks, st.data())
def test_the_window_of_a_fork_holds_exactly_what_can_be_worked_on(plan, data):
    updated = data.draw(st.sampled_from([-1, *range(plan.start, plan.iterations + 1)]))
    evaluated = data.draw(st.integers(0, sum(iteration <= updated for iteration in plan.evaluations())))
    done = {Task(plan.start, Stage.UPDATE), *plan.evaluation_tasks()[:evaluated]}
    for iteration in [0, *range(plan.start + 1, updated + 1)] if updated >= 0 else []:
        done |= {task for task in plan.tasks(iteration) if task.stage is not Stage.EVALUATE}
    window = plan.window(updated, evaluated)
    missing = [task for task in plan.all_tasks() if task not in done]
    assert {task for task in missing if set(plan.inputs(task)) <= done} <= set(window) <= set(missing)


def test_no_plan_but_a_fork_s_is_given_anything():
    fresh = Plan(3, 1, 1)
    assert not any(map(fresh.is_given, [*fresh.all_tasks(), Task(0, Stage.UPDATE)]))


@pytest.mark.parametrize("damage", [None, "policy/00002.fork/model.safetensors is gone"])
def test_a_first_policy_that_is_lost_ends_the_fork_with_the_way_out(damage):
    """Nothing is moved aside: a person may be able to fix it."""
    plan, given = Plan(4, 1, 0, 2), Task(2, Stage.UPDATE)
    window = plan.window(2, 0)
    seen = Observation(
        window,
        {PREPARE: SimpleNamespace(fingerprint="p", inputs={})},
        {given: damage} if damage else {},
        set(),
        {},
    )
    actions = reconcile(plan, seen, 3)
    (gave_up,) = actions.give_up
    assert (gave_up.task, gave_up.kind) == (given, FailureKind.CONFIG)
    assert gave_up.message.startswith(damage or "its commit record is gone")
    assert gave_up.message.endswith("put it back from the parent, or fork again")
    assert (actions.launch, actions.retract) == ((), ())


# --- a fork on disk ---


@pytest.fixture
def parent(complete_run, tmp_path) -> Path:
    return Path(shutil.copytree(complete_run, tmp_path / "parent", symlinks=True))


def make_fork(parent: Path, root: Path, *overrides: str, iteration: int = 1) -> Run:
    version = find_parent(f"{parent}@{iteration}")
    return fork(version, fork_config(version, root, overrides, None))


def contents(run: Path, version: int) -> dict[str, bytes]:
    folders = {section: (run / section / f"{version:05d}").resolve() for section in SECTIONS}
    return {
        f"{section}/{path.relative_to(folder)}": path.read_bytes()
        for section, folder in folders.items()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_fork_without_overrides_gets_what_its_parent_got_byte_for_byte(complete_run, tmp_path, slurm_ppo):
    made = slurm_ppo("fork", f"{complete_run}@1", tmp_path / "fork")
    assert made.returncode == 0, made.stderr
    assert f"forked from policy 1 of {complete_run}; the fork begins with iteration 2 of 2" in made.stdout
    assert made.stdout.splitlines()[-1] == f"  start it:  slurm-ppo resume {tmp_path / 'fork'}"
    done = slurm_ppo("resume", tmp_path / "fork")
    assert done.returncode == 0, done.stderr
    for version in (1, 2):
        assert contents(tmp_path / "fork", version) == contents(complete_run, version)
    (row,) = journal.read(tmp_path / "fork/metrics.jsonl")
    _, expected = journal.read(complete_run / "metrics.jsonl")
    timing = ("seconds/", "tokens_per_second/", "model_tokens_per_second/", "memory_gib/")
    names = [name for name in expected if not name.startswith(timing)]
    assert {name: row[name] for name in names} == {name: expected[name] for name in names}
    status = read_status(load_run(tmp_path / "fork"))
    assert (status.state, status.iterations_done, status.evaluations) == ("complete", 2, 2)
    assert status.forked_from == f"{complete_run}@1"
    assert [r["iteration"] for r in read_rows(load_run(tmp_path / "fork"))] == [1, 2]


def test_overrides_change_the_fork_and_nothing_of_its_parent(parent, tmp_path, slurm_ppo):
    before = {path: path.read_bytes() for path in parent.rglob("*") if path.is_file()}
    more = ("iterations=3", "algorithm=grpo", "rollout.samples_per_prompt=2", "algorithm.kl.coef=0.5")
    run = make_fork(parent, tmp_path / "fork", *more, iteration=2)
    assert (run.config.algorithm.estimator, run.config.iterations) == ("grpo", 3)
    assert run.config.update == load_run(parent).config.update
    done = slurm_ppo("resume", run.paths.root)
    assert done.returncode == 0, done.stderr
    (row,) = journal.read(run.paths.metrics)
    assert (row["iteration"], row["policy_version"], row["objective/kl_coef"]) == (3, 3, 0.5)
    assert row["samples"] == 2 * 8 + 16, "what the parent trained on counts on"
    assert not list(run.paths.states.glob("00003.*/critic"))
    assert {path: path.read_bytes() for path in parent.rglob("*") if path.is_file()} == before


def test_a_fork_begins_with_a_commit_of_its_own_that_names_the_parent(parent, tmp_path):
    run = make_fork(parent, tmp_path / "fork")
    parents = load_run(parent).paths
    source, record = (require_record(paths, policy_maker(1)) for paths in (parents, run.paths))
    assert record.fingerprint == source.fingerprint
    assert {entry.folder for entry in record.outputs} == {"policy/00001.fork", "iterations/00001"}
    identity = load_run(parent).identity
    assert record.inputs == {f"run:{identity.id}/1/update/0": source.fingerprint}
    assert run.identity.parent == Parent(identity.id, str(parent), 1)
    assert run.identity.id != identity.id
    assert run.identity.folder == identity.folder
    assert run.config.name == "fork"
    assert run.config.model == load_run(parent).config.model
    state = require_record(run.paths, state_of(1))
    assert {entry.folder for entry in state.outputs} == {"state/00001.fork"}
    assert state.inputs == {f"run:{identity.id}/1/state/0": require_record(parents, state_of(1)).fingerprint}
    files = [run.paths.root / entry.path for entry in (*record.outputs, *state.outputs)]
    assert all(path.stat().st_nlink == 2 for path in files), "second names, not copies"
    shutil.rmtree(parent)
    assert contents(run.paths.root, 1) == {}  # the link for people comes with the first pass
    assert all(path.stat().st_size for path in files)


def test_on_another_filesystem_files_are_copied(parent, tmp_path, monkeypatch):
    real = os.link

    def link(source, target, **options):
        if "parent" in str(source):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        real(source, target, **options)

    monkeypatch.setattr(os, "link", link)
    run = make_fork(parent, tmp_path / "fork")
    record = require_record(run.paths, policy_maker(1))
    assert all((run.paths.root / entry.path).stat().st_nlink == 1 for entry in record.outputs)
    for entry in record.outputs:
        assert (run.paths.root / entry.path).stat().st_size == entry.bytes


@pytest.mark.parametrize("section", SECTIONS)
def test_a_parent_that_is_damaged_is_named_and_no_fork_is_left(parent, tmp_path, section):
    path = next(parent.glob(f"{section}/00001.*/**/*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(RunError, match=f"no longer holds what was committed: .*{path.name} has xxh3_128"):
        make_fork(parent, tmp_path / "fork")
    assert [path.name for path in tmp_path.iterdir()] == ["parent"]


def test_groups_lay_over_the_parents_settings_but_scheduler_and_reward_replace_them(complete_run, tmp_path):
    version = find_parent(f"{complete_run}@1")
    words = ["scheduler=slurm", "scheduler.python=/py", "algorithm=rloo", "rollout.samples_per_prompt=2"]
    words += ["reward=rule", "reward.components.rule.function=a:b"]
    config = fork_config(version, tmp_path / "a fork@1", words, None)
    assert (config.scheduler.kind, config.scheduler.python) == ("slurm", "/py")
    assert list(config.reward.components) == ["rule"]
    assert config.algorithm.estimator is Estimator.RLOO
    assert config.algorithm.kl == version.run.config.algorithm.kl
    assert config.update == version.run.config.update
    assert config.name == "a-fork-1"


# --- what a fork refuses ---


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "iterations=2: policy 2 of .* is its last; give iterations=N, more than 2"),
        (["iterations=1"], "iterations=1: .*more than 2"),
        (["iterations=3", "model.policy={inputs}/reward_model"], "model.policy=.*goes on from policy 2"),
        (["iterations=3", "model.critic={inputs}/reward_model"], "model.critic=.*the parent's critic"),
        (["iterations=3", "update=zero2"], "update.precision=bf16: the trainer state .* made with fp32"),
        (["iterations=3", "+update.lora={rank: 4}"], "update.lora=.*rank=4.*made with None"),
        (
            ["iterations=3", "algorithm.kl.controller=adaptive", "algorithm.kl.coef=0.3"],
            "algorithm.kl.coef=0.3: the adaptive controller goes on",
        ),
        (
            ["iterations=3", "algorithm.shaping.normalize=true", "reward.components.rm.weight=2.0"],
            "algorithm.shaping.normalize=True: .*mean and spread of the parent's reward.*set it to false",
        ),
        (["run_dir=elsewhere"], "run_dir: the fork's directory is the second argument"),
        (["iteration=3"], "unknown key 'iteration'.*did you mean 'iterations'"),
        (["update.keep_last=1", "iterations=3"], "update.keep_last=1"),
    ],
)
def test_overrides_that_the_state_cannot_go_on_with_are_refused(
    complete_run, inputs, tmp_path, overrides, said
):
    words = [text.replace("{inputs}", str(inputs)) for text in overrides]
    with pytest.raises(ConfigError, match=said):
        make_fork(complete_run, tmp_path / "fork", *words, iteration=2)
    assert not (tmp_path / "fork").exists()


def test_states_are_not_saved_so_rarely_that_learning_again_would_run_into_the_time_limit(
    complete_run, tmp_path
):
    parent = find_parent(f"{complete_run}@1")
    slow = {"seconds/update/read": 10.0, "seconds/update/steps": 210.0}
    parent = replace(parent, record=replace(parent.record, metrics={**parent.record.metrics, **slow}))
    rarely, limit = "update.save_every=50", "scheduler.time_limit=400"
    said = (
        "update.save_every=50: updates took 220 s, so that learning 1 again takes 220 s, more than half of "
        r"the update's time limit \(400 s\); leave it at 1, or raise the limit"
    )
    with pytest.raises(ConfigError, match=said):
        fork_config(parent, tmp_path / "fork", [rarely, limit], None)
    assert fork_config(parent, tmp_path / "fork", [limit], None).update.save_every == 1
    assert fork_config(parent, tmp_path / "fork", [rarely], None).update.save_every == 50


def test_rewards_are_normalised_on_while_they_are_the_same_ones(complete_run, tmp_path):
    words = ["algorithm.shaping.normalize=true", "reward.tokens_per_batch=512"]
    config = fork_config(find_parent(f"{complete_run}@1"), tmp_path / "fork", words, None)
    assert config.algorithm.shaping.normalize


@pytest.fixture(scope="module")
def begun(inputs, tmp_path_factory) -> tuple[Path, Path]:
    """A parent of which iteration 1 is committed, with models of its own, and the folder of those."""
    folder = tmp_path_factory.mktemp("begun")
    models = Path(shutil.copytree(inputs, folder / "models"))
    shutil.copytree(models / "policy", models / "reference")
    run = processes.make_run(models, folder / "parent", f"model.reference={models / 'reference'}")
    done = processes.stage(run, "prepare")
    assert done.code == 0, done.log
    commit(run, 1)
    return run.paths.root, models


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("policy/model.safetensors", [], "model.policy=.*{path} has changed since the parent .* restore it"),
        ("policy/tokenizer.json", [], "model.policy=.*{path} has changed since the parent"),
        ("reference/config.json", [], "model.reference=.*{path} has changed since the parent"),
        ("reference/config.json", ["model.reference={models}/policy"], None),
        ("reward_model/model.safetensors", [], None),
        (
            "reward_model/model.safetensors",
            ["algorithm.shaping.normalize=true"],
            "reward.components.rm.path=.*{path} has changed since the parent",
        ),
    ],
)
def test_models_that_are_no_longer_those_of_the_parent_are_refused(begun, tmp_path, name, overrides, said):
    root, models = begun
    path, parent = models / name, find_parent(f"{root}@1")
    words = [text.replace("{models}", str(models)) for text in overrides]
    content = path.read_bytes()
    is_text = path.suffix == ".json"  # weights have to stay a file that can be loaded
    path.write_bytes(content + b" " if is_text else content[:-1] + bytes([content[-1] ^ 1]))
    try:
        if said is None:
            fork_config(parent, tmp_path / "fork", words, None)
        else:
            with pytest.raises(ConfigError, match=said.replace("{path}", str(path))):
                fork_config(parent, tmp_path / "fork", words, None)
    finally:
        path.write_bytes(content)
    fork_config(parent, tmp_path / "fork", words, None)  # another time of modification changes nothing


def test_a_model_of_which_a_file_is_gone_is_refused(begun, tmp_path):
    root, models = begun
    path = models / "policy" / "generation_config.json"
    path.rename(models / "elsewhere")
    with pytest.raises(ConfigError, match=f"model.policy=.*{path} was removed since the parent began"):
        fork_config(find_parent(f"{root}@1"), tmp_path / "fork", [], None)
    (models / "elsewhere").rename(path)


def test_a_parent_that_cannot_say_what_it_was_made_from_is_mended_first(parent, tmp_path):
    record = load_run(parent).paths.task(PREPARE).record
    record.write_text("{")
    with pytest.raises(RunError, match=f"{parent}: .*{record.name} cannot be read .*resume makes it again"):
        make_fork(parent, tmp_path / "fork")


def test_a_critic_cannot_be_made_up(complete_run, tmp_path):
    version = find_parent(f"{complete_run}@1")
    config = version.run.config
    critic_free = replace(config, algorithm=replace(config.algorithm, estimator=Estimator.REMAX))
    version = replace(version, run=replace(version.run, config=critic_free))
    with pytest.raises(ConfigError, match=r"estimator=gae: needs a critic, .*=remax\) has none; start a new"):
        fork_config(version, tmp_path / "fork", ["algorithm.estimator=gae"], None)
    assert fork_config(version, tmp_path / "fork", [], None).algorithm.estimator == "remax"


@pytest.mark.parametrize(
    ("iteration", "said"),
    [
        (0, "trainer's state 0 of .* is the model that it began with"),
        (3, "trainer's state 3 of .* is not there yet; choose 1, 2"),
    ],
)
def test_where_there_is_nothing_to_go_on_from(complete_run, tmp_path, iteration, said):
    with pytest.raises(RunError, match=said):
        make_fork(complete_run, tmp_path / "fork", iteration=iteration)


def test_a_directory_that_is_taken_is_refused_and_a_fork_is_not_started_over(
    parent, tmp_path, slurm_ppo, inputs
):
    run = make_fork(parent, tmp_path / "fork")
    before = sorted(path for path in run.paths.root.rglob("*"))
    with pytest.raises(RunError, match="exists and is not empty"):
        make_fork(parent, tmp_path / "fork")
    done = slurm_ppo("run", *tiny.overrides(inputs, run.paths.root))
    assert done.returncode == 2
    assert f"To continue it: slurm-ppo resume {run.paths.root}" in done.stderr
    assert sorted(path for path in run.paths.root.rglob("*")) == before


def test_a_fork_stays_in_the_parents_project_on_wandb_whatever_the_shell(parent, tmp_path, monkeypatch):
    """Under a name of its own; a project that the fork is told goes first."""
    for name in ("WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    before = load_run(parent)
    place = WandbPlace(name="parent", project="paper", entity="team")
    before.paths.run_json.write_text(identity_text(replace(before.identity, wandb=place)))
    words = ("tracking=wandb", "tracking.wandb.mode=offline")
    run = make_fork(parent, tmp_path / "fork", *words)
    assert (run.identity.wandb.project, run.identity.wandb.entity) == ("paper", "team")
    assert run.identity.wandb.name == run.identity.name
    told = make_fork(parent, tmp_path / "told", *words, "tracking.wandb.project=own")
    assert told.identity.wandb.project == "own"


# --- counting from where it begins ---


def test_before_it_has_run_every_view_shows_where_a_fork_begins(parent, tmp_path, slurm_ppo):
    run = make_fork(parent, tmp_path / "fork", "iterations=5", "evaluate.every=2")
    assert find_frontier(run.plan, run.paths) == Frontier(-1, 0)
    said = slurm_ppo("status", run.paths.root).stdout
    assert f"incomplete, 1/5 iterations, 0/4 evaluations, forked from {parent}@1" in said
    listed = slurm_ppo("plan", run.paths.root, "--all").stdout.splitlines()
    tasks = [line.removesuffix(": not committed") for line in listed if line.startswith("iteration")]
    assert tasks[:2] == ["iteration 1 evaluate", "iteration 2 rollout shard 0"]
    assert "iteration 1 update" not in tasks
    page = write_report(run).read_text()
    assert "1 of 5" in page
    assert "No iteration is committed yet" in page


def test_a_fork_cannot_go_back_to_before_it_began(parent, tmp_path):
    run = make_fork(parent, tmp_path / "fork", "iterations=5")
    for point, said in (("update@1", "forked after iteration 1"), ("rollout@3", "cannot go back to 3")):
        with pytest.raises(RunError, match=said):
            go_back(run, parse_point(point))
    assert go_back(run, parse_point("rollout@2")) is None


def test_rows_of_a_fork_are_behind_when_the_last_one_is(parent, tmp_path):
    """W&B's steps count the fork's own rows."""
    run = make_fork(parent, tmp_path / "fork", "iterations=5", "tracking.wandb.mode=online")
    assert not behind(run)
    journal.append(run.paths.metrics, {"iteration": 2})
    write_state(run.paths, replace(Sent().with_sent(published(run)), confirmed=1))
    assert not behind(run)
    journal.append(run.paths.metrics, {"iteration": 3})
    assert behind(run)


# --- on Slurm ---


def as_fork(world: World, start: int) -> World:
    """The same world, with a run that begins after iteration ``start``."""
    paths, config = world.run.paths, world.run.config
    paths.run_json.unlink()
    paths.policies.mkdir()
    assert publish(paths, make_record(Task(start, Stage.UPDATE)))
    world.run = write_run(paths, config, "", Parent("abc", "/parent", start))
    return world


@pytest.mark.parametrize("luck", [Luck(), Luck(mishaps=6, disturbances=6, kills=2)])
def test_a_fork_on_slurm_runs_to_its_end(tmp_path, monkeypatch, clock, luck):
    done = 0
    for seed in range(14):
        world = make_world(tmp_path / f"seed-{seed}", monkeypatch, seed, luck)
        if world.run.plan.iterations == 1:
            continue
        start = 1 + seed % (world.run.plan.iterations - 1)
        as_fork(world, start)
        world.submit()
        world.live_on()
        assert world.outcome == "complete", world.told()
        rows = [row["iteration"] for row in journal.read(world.run.paths.metrics)]
        assert rows == list(range(start + 1, world.run.plan.iterations + 1))
        started = {int(path.name) for path in (world.run.paths.root / "iterations").iterdir()}
        assert min(started) == start
        done += 1
    assert done > 5
