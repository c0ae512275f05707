"""Light tasks: that they are light, and that what they end in shows every wrong input."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.run.commits import read_record
from pipeline.run.directory import Run
from pipeline.run.plan import state_of
from pipeline.run.schemas import PROMPTS, ROLLOUT
from pipeline.run.shards import read_shard
from pipeline.run.tasks import PREPARE, Stage, Task
from stages.context import Context
from stages.generation.responding import requests_of
from stages.training import read_shards
from tests.support import ROOT, light_training, processes, tiny
from tests.support.waiting import wait_for

UPDATE = Task(2, Stage.UPDATE)
HEAVY = {"torch", "transformers", "deepspeed", "vllm", "httpx", "hydra", "wandb"}
HEAVY |= {"pyarrow.parquet", "ssl"}


def modules_of(*arguments: object) -> set[str]:
    """What ``python -m stages`` with these arguments has imported when it ends."""
    script = "import sys; from stages.attempts.runner import main; main(sys.argv[1:]); print(*sys.modules)"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("stage", ["rollout", "reward", "update", "evaluate"])
def test_a_light_task_imports_nothing_heavy(run, stage):
    record = run.paths.task(Task(2, Stage(stage))).record
    record.unlink()
    assert not modules_of(stage, "--run-dir", run.paths.root, "--iteration", 2) & HEAVY
    assert record.exists()


def test_a_task_that_is_committed_ends_before_it_reads_the_configuration(run):
    found = modules_of("rollout", "--run-dir", run.paths.root, "--iteration", 2)
    assert not found & {*HEAVY, "pyarrow", "numpy", "pipeline.config.schema", "stages.attempts.execution"}


def test_a_task_that_may_wait_goes_on_once_its_input_is_committed(run, tmp_path):
    """Another machine has committed it, and this one does not see it yet."""
    paths = run.paths.task(Task(2, Stage.ROLLOUT))
    run.paths.task(Task(2, Stage.REWARD)).record.unlink()
    hidden = paths.record.rename(tmp_path / "hidden")
    log = tmp_path / "log"
    given = [*processes.stage_arguments(run, "reward", 2), "--patience", "60"]
    process = processes.start_stage(given, log)
    wait_for(lambda: log.exists() and "for iteration 2 rollout shard 0" in log.read_text(), "the task")
    hidden.rename(paths.record)
    process.join(timeout=60)
    assert process.exitcode == 0, log.read_text()


def chain_of(run: Run, monkeypatch: pytest.MonkeyPatch, change) -> bytes:
    """Weights of policy 2, when what the trainer reads was changed on the way."""

    def changed(context: Context, iteration: int):
        return change(*read_shards(context, iteration))

    monkeypatch.setattr(light_training, "read_shards", changed)
    attempt = f"1-{change.__name__}"
    light_training.LightTrainer().update(Context(run.paths, run.config, UPDATE, attempt), 2)
    return (run.paths.task(UPDATE).policy(attempt) / "model.safetensors").read_bytes()


def as_it_is(responses, rewards, shards):
    return responses, rewards, shards


def one_doubled(responses, rewards, shards):
    return (
        pa.concat_tables([responses, responses[:1]]),
        pa.concat_tables([rewards, rewards[:1]]),
        [*shards, 0],
    )


def one_lost(responses, rewards, shards):
    return responses[1:], rewards[1:], shards[1:]


def two_swapped(responses, rewards, shards):
    order = [1, 0, *range(2, responses.num_rows)]
    return responses.take(order), rewards.take(order), shards


def another_score(responses, rewards, shards):
    index = rewards.column_names.index("reward")
    scores = [0.5, *rewards["reward"].to_pylist()[1:]]
    return responses, rewards.set_column(index, "reward", pa.array(scores, pa.float32())), shards


def another_shard(responses, rewards, shards):
    return responses, rewards, [1 - shards[0], *shards[1:]]


@pytest.mark.parametrize("change", [one_doubled, one_lost, two_swapped, another_score, another_shard])
def test_a_wrong_input_shows_in_the_next_policy(run, monkeypatch, change):
    right = (run.paths.policies / "00002" / "model.safetensors").read_bytes()
    assert chain_of(run, monkeypatch, as_it_is) == right
    assert chain_of(run, monkeypatch, change) != right


def test_another_policy_before_it_shows_in_the_next_policy(run, monkeypatch):
    right = chain_of(run, monkeypatch, as_it_is)
    other = run.paths.policies / "00002"
    monkeypatch.setattr(Context, "policy_directory", lambda self, version: other)
    assert chain_of(run, monkeypatch, another_policy) != right


def another_policy(responses, rewards, shards):
    return responses, rewards, shards


@pytest.mark.parametrize("part", ["critic", "moments"])
def test_another_state_before_it_shows_in_the_next_policy(run, monkeypatch, part):
    right = chain_of(run, monkeypatch, as_it_is)
    state = run.paths.states / "00001"
    other = Path(shutil.copytree(state, run.paths.root / "other"))
    shutil.copytree(run.paths.states / "00002" / part, other / part, dirs_exist_ok=True)
    monkeypatch.setattr(Context, "state_directory", lambda self, version: other)
    assert chain_of(run, monkeypatch, another_state) != right


def another_state(responses, rewards, shards):
    return responses, rewards, shards


def test_a_state_that_is_lost_is_learnt_again_to_the_same_policy(run, monkeypatch):
    right = chain_of(run, monkeypatch, as_it_is)
    run.paths.task(state_of(1)).record.unlink()
    assert chain_of(run, monkeypatch, after_a_loss) == right


def after_a_loss(responses, rewards, shards):
    return responses, rewards, shards


def test_each_response_of_a_run_has_a_seed_of_its_own(run):
    """Also that to the same prompt in a later epoch."""
    prompts = read_shard(run.paths, read_record(run.paths, PREPARE), PROMPTS)
    repeated = prompts.take([i for i in range(prompts.num_rows) for _ in range(2)])
    seeds = [
        request.seed
        for task in (Task(1, Stage.ROLLOUT), Task(2, Stage.ROLLOUT), Task(1, Stage.EVALUATE))
        for request in requests_of(Context(run.paths, run.config, task, "1-a"), repeated, (0, 1))
    ]
    assert len(set(seeds)) == len(seeds) == 3 * 2 * prompts.num_rows


def seeds_of_samples(run: Run, version: int, seed: int = 0, evaluate_seed: int | None = None) -> list[int]:
    """Seeds of the responses of an evaluation, two to a prompt."""
    prompts = read_shard(run.paths, read_record(run.paths, PREPARE), PROMPTS)
    repeated = prompts.take([i for i in range(prompts.num_rows) for _ in range(2)])
    evaluate = replace(run.config.evaluate, seed=evaluate_seed)
    context = Context(
        run.paths, replace(run.config, seed=seed, evaluate=evaluate), Task(version, Stage.EVALUATE), "1-a"
    )
    return [request.seed for request in requests_of(context, repeated, (0, 1))]


def test_an_evaluation_samples_with_the_same_seeds_whatever_the_policy(run):
    """So that policies differ in what they answer, and not in their luck."""
    found = seeds_of_samples(run, 0)
    assert len(set(found)) == len(found)
    assert seeds_of_samples(run, 1) == seeds_of_samples(run, 2) == found
    assert not {*seeds_of_samples(run, 1, seed=9)} & {*found}
    own = seeds_of_samples(run, 1, seed=0, evaluate_seed=9)
    assert own == seeds_of_samples(run, 2, seed=5, evaluate_seed=9) == seeds_of_samples(run, 2, seed=9)


def test_responses_follow_from_policy_prompt_and_seed(run):
    tables = [
        read_shard(run.paths, read_record(run.paths, Task(iteration, Stage.ROLLOUT, shard)), ROLLOUT)
        for iteration in (1, 2)
        for shard in (0, 1)
    ]
    responses = [tuple(r) for table in tables for r in table["response_tokens"].to_pylist()]
    assert len(set(responses)) > 0.9 * len(responses)
    reasons = {reason for table in tables for reason in table["finish_reason"].to_pylist()}
    assert reasons == {"stop", "length"}


# --- trainers and tokenizers of a user's own ---


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("update.engine=nowhere:make", "update.engine=nowhere:make: no module 'nowhere'"),
        ("update.engine=tests.support.light:nothing", "module 'tests.support.light' has no 'nothing'"),
        ("update.engine=adam", "update.engine"),
        ("scheduler.update.ranks=2", "is given 2 ranks, and this trainer does not say that it takes several"),
        ("model.tokenizer=nowhere:make", "model.tokenizer=nowhere:make: no module 'nowhere'"),
        ("model.tokenizer=tests.support.light:make_scorer", "cannot be called with 1 arguments"),
    ],
)
def test_mistakes_are_named_before_anything_runs(inputs, slurm_ppo, tmp_path, word, said):
    done = slurm_ppo("validate", *tiny.overrides(inputs, tmp_path / "run"), word)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_trainer_that_takes_ranks_may_be_given_several(inputs, slurm_ppo, tmp_path):
    words = ("scheduler.update.ranks=2", "update.engine=tests.support.light:make_trainer_of_ranks")
    done = slurm_ppo("validate", *tiny.overrides(inputs, tmp_path / "run"), *words)
    assert done.returncode == 0, done.stderr


def test_what_is_no_trainer_is_named(inputs, environment, tmp_path):
    run = processes.make_run(inputs, tmp_path / "run", "update.engine=builtins:repr")
    for stage, iteration, code in (("prepare", 0, 0), ("update", 1, 2)):
        done = processes.python_m_stages(processes.stage_arguments(run, stage, iteration), environment)
        assert done.code == code, done.log
    assert "builtins:repr made str, not a stages.engines.base.PolicyTrainer" in done.log


def test_the_update_counts_responses(complete_run):
    (learned,) = (complete_run / "iterations/00002/update").glob("shard-00000.learned.*.json")
    assert json.loads(learned.read_text())["responses"] == 16
