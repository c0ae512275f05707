"""A process that does task after task gives what processes of their own give, to the byte."""

import json
import os
import shutil
from pathlib import Path

import pytest

from pipeline.run.commits import require_record
from pipeline.run.directory import Run, load_run
from tests.support import processes
from tests.support.processes import make_run, stage
from tests.support.tables import LONG
from tests.support.updates import memory_of_updates, scored_run
from tests.support.used import commit_policy, done_by_each, done_by_one, outputs, task_of

TRIAL = pytest.mark.trial(1 / 2)
GENERATED = ["rollout 1 0", "rollout 1 1", "evaluate 0", "rollout 2 0", "evaluate 1", "rollout 3 0"]
SCORED = [
    "score 1 0 judges",
    "reward 1 0",
    "score 1 1 judges",
    "reward 1 1",
    "score 3 0 judges",
    "reward 3 0",
]

VLLM = ("enforce_eager=true", "kv_cache_gib=0.25")

CONVERSATIONS = (
    "rollout.max_new_tokens=40",
    f"rollout.stop_token_ids=[{','.join(map(str, range(20, 60)))}]",
    "rollout.multi_turn.scheduler=tests.support.schedulers:until_third",
)


def prepared(models: Path, folder: Path, *more: str, is_adapter: bool = False) -> Run:
    """A run with two policies besides the user's."""
    run = make_run(
        models,
        folder / "run",
        f"data.heldout={models / 'heldout.jsonl'}",
        "evaluate.every=1",
        "iterations=4",
        *more,
    )
    done = stage(run, "prepare")
    assert done.code == 0, done.log
    for version in (1, 2):
        commit_policy(run, version, seed=10 + version, is_adapter=is_adapter)
    return run


def copy_of(run: Run, folder: Path) -> Path:
    shutil.copytree(run.paths.root, folder)
    return folder


def without(root: Path, tasks: list[str], folder: Path) -> Path:
    """Copy a run, before it had done these tasks."""
    copied = copy_of(load_run(root), folder)
    for text in tasks:
        load_run(copied).paths.task(task_of(text)).record.unlink()
    return copied


@pytest.fixture(scope="module")
def plain(models, tmp_path_factory) -> tuple[Run, Path]:
    """A run, and a copy with its tasks done by processes of their own. Tests must not change them."""
    run = prepared(
        models,
        tmp_path_factory.mktemp("plain"),
        "reward.components.rm.normalization.mean=0.5",
        "reward.components.rm.normalization.std=2",
        f"+reward.components.other.path={models / 'reward_model'}",
        "+reward.components.other.kind=model",
        "+reward.components.other.pool=judges",
    )
    fresh = copy_of(run, run.paths.root.parent / "fresh")
    done_by_each(fresh, [*GENERATED, *SCORED])
    return run, fresh


@TRIAL
def test_rollouts_and_evaluations_take_turns(plain, tmp_path):
    """The policy goes into the model that is there, and nothing of a greedy evaluation stays."""
    run, fresh = plain
    used = copy_of(run, tmp_path / "used")
    said = done_by_one(used, GENERATED)
    assert outputs(used, GENERATED) == outputs(fresh, GENERATED)
    assert len(outputs(used, GENERATED)) == len(GENERATED)
    generating = 1  # and the reward model of the evaluations
    assert said["loads"][-1] == generating + 1


@TRIAL
def test_what_workers_of_rollouts_measure_besides_takes_the_engine_that_they_hold(plain, tmp_path):
    """And no more memory afterwards: the reward model goes."""
    run, fresh = plain
    used = copy_of(run, tmp_path / "used")
    steps = [f"besides {task}" if task.startswith("evaluate") else task for task in GENERATED]
    said = done_by_one(used, steps)
    assert outputs(used, GENERATED) == outputs(fresh, GENERATED)
    measured = sum(task.startswith("evaluate") for task in GENERATED)
    assert said["loads"][-1] == 1 + measured


@TRIAL
def test_what_was_loaded_ahead_is_what_the_task_computes_with(plain, tmp_path):
    """Also where it is an older policy, as the next one is still to come."""
    run, fresh = plain
    used = copy_of(run, tmp_path / "used")
    tasks = ["rollout 3 0", "score 3 0 judges", "reward 3 0"]
    steps = ["loads rollout 1 0", tasks[0], "loads score 3 0 judges", tasks[1], "loads reward 3 0", tasks[2]]
    said = done_by_one(used, steps)
    assert outputs(used, tasks) == outputs(fresh, tasks)
    before, after = said["loads"][::2], said["loads"][1::2]
    assert before == after  # each task found all that it needs
    assert before[0] == 1


@TRIAL
def test_a_failed_task_and_earlier_policies_leave_nothing_behind(plain, tmp_path):
    run, fresh = plain
    used = copy_of(run, tmp_path / "used")
    steps = [
        "breaks rollout 3 0",
        "only rollout 2 1",
        "rollout 1 0",
        "breaks evaluate 2",
        "rollout 3 0",
        "rollout 2 0",
    ]
    done_by_one(used, steps)
    tasks = ["rollout 1 0", "rollout 3 0", "rollout 2 0"]
    assert outputs(used, tasks) == outputs(fresh, tasks)


@TRIAL
def test_a_policy_that_was_taken_back_and_made_again_is_not_mistaken_for_it(plain, tmp_path):
    run, fresh = plain
    used = copy_of(run, tmp_path / "used")
    same = ["only rollout 2 0", "policy 1 11 1-ab", "only rollout 2 0"]
    said = done_by_one(used, [*same, "policy 1 77 1-ab", "rollout 2 0", "policy 1 11 2-cd", "rollout 2 1"])
    assert said["loads"][-1] == 1
    other = copy_of(run, tmp_path / "other")
    done_by_one(other, ["policy 1 77 1-ab"])
    done_by_each(other, ["rollout 2 0"])
    assert outputs(used, ["rollout 2 0"]) == outputs(other, ["rollout 2 0"])
    assert outputs(used, ["rollout 2 0"]) != outputs(fresh, ["rollout 2 0"])


@TRIAL
def test_reward_models_and_the_reference_stay_for_all_shards(plain, tmp_path):
    _, fresh = plain
    used = without(fresh, SCORED, tmp_path / "used")
    said = done_by_one(used, SCORED)
    assert outputs(used, SCORED) == outputs(fresh, SCORED)
    assert said["loads"][-1] == 2


@LONG
def test_vllm_scores_beside_the_reference_that_stays(models, tmp_path):
    run = prepared(models, tmp_path, "reward.engine=vllm", *(f"reward.vllm.{word}" for word in VLLM))
    done_by_one(run.paths.root, ["rollout 1 0", "rollout 1 1"])
    used, fresh = (copy_of(run, tmp_path / name) for name in ("used", "fresh"))
    said = done_by_one(used, ["reward 1 0", "reward 1 1"])
    done_by_each(fresh, ["reward 1 1"])
    assert outputs(used, ["reward 1 1"]) == outputs(fresh, ["reward 1 1"])
    assert said["loads"] == [1, 1]  # the reference


@pytest.mark.parametrize(
    ("tasks", "loads"), [(["rollout 2 0", "rollout 3 0"], 1), (["reward 1 0", "reward 1 1"], 2)]
)
def test_fifty_tasks_grow_no_memory(plain, tmp_path, tasks, loads):
    _, fresh = plain
    used = without(fresh, tasks, tmp_path / "used")
    said = done_by_one(used, [f"only {task}" for task in tasks * 25])
    assert said["loads"][-1] == loads
    grown = said["bytes"][-1] - said["bytes"][9]
    assert grown < 4 * 2**20, f"{grown / 2**20:.1f} MiB in forty tasks"


@pytest.mark.soak
def test_many_updates_of_a_learner_that_stays_grow_no_memory(models, tmp_path):
    """As long as it saves each state, too."""
    iterations = 200 if "SOAK_ROUNDS" in os.environ else 20
    run = scored_run(models, tmp_path / "run", "fp32-zero0", save_every=1, iterations=iterations)
    said = tmp_path / "said.json"
    assert processes.in_process_of_its_own(memory_of_updates, run.paths.root, said) == 0
    sizes = json.loads(said.read_text())
    assert max(sizes) <= 1.05 * sizes[9], sizes


@TRIAL
def test_adapters_are_put_on_one_after_the_other_and_conversations_leave_nothing_behind(models, tmp_path):
    run = prepared(models, tmp_path, *CONVERSATIONS, "+update.lora={rank: 4, alpha: 8}", is_adapter=True)
    tasks = ["rollout 2 0", "evaluate 2", "rollout 3 0", "evaluate 0", "rollout 1 0", "evaluate 1"]
    fresh, used = copy_of(run, tmp_path / "fresh"), copy_of(run, tmp_path / "used")
    done_by_each(fresh, tasks)
    said = done_by_one(used, tasks)
    assert outputs(used, tasks) == outputs(fresh, tasks)
    assert said["loads"][-1] == 2  # the policy's base, and the reward model
    record = require_record(load_run(used).paths, task_of("rollout 2 0"))
    assert record.metrics["turns"] > 1.5 * record.rows
