"""Configuration: a mistake is answered with its key, its value and what is legal, before anything is made."""

import ast
import dataclasses
import functools
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import scheduler as schedulerconfig
from pipeline.config import schema as config_module
from pipeline.config.algorithm import GROUP_ESTIMATORS, Estimator, KLPlacement
from pipeline.config.choices import known_groups
from pipeline.config.compose import compose, from_mapping, to_mapping, to_yaml
from pipeline.config.findings import Findings
from pipeline.config.issue import ConfigError
from pipeline.config.resolve import configure, resolve
from pipeline.config.scheduler import SLURM_STAGES, resources_of
from pipeline.config.schema import Config
from tests.support import ALONE, ROOT, tiny
from tests.support.tables import sample

COMPLETE = ("reward=rule", "reward.components.rule.function=a:b", "model.policy=x", "data.prompts=x")
"""What a configuration cannot be without."""


def refusal(inputs: Path, run_dir: Path, *more: str, config_dir: Path | None = None) -> list[str]:
    """The lines with which a configuration is refused."""
    with pytest.raises(ConfigError) as refused:
        configure(tiny.overrides(inputs, run_dir, *more), config_dir)
    return str(refused.value).splitlines()


MISTAKES = [
    # override, what the message must hold: key, value, something legal
    ("updte.epochs=2", ["updte.epochs", "'updte'", "did you mean 'update'"]),
    ("update.epoch=2", ["update.epoch", "'epoch' in update", "did you mean 'epochs'"]),
    ("+update.epoch=2", ["update.epoch", "did you mean 'epochs'"]),
    ("++nothing=2", ["nothing", "at the top", "legal: name, run_dir"]),
    ("+nothing=2", ["nothing", "at the top", "legal: name, run_dir"]),
    ("reward.components.rm.wieght=2", ["reward.components.rm.wieght", "did you mean 'weight'"]),
    ("reward.components.x={kind:rule}", ["reward.components.x.function", "must be given"]),
    ("reward.components.x={path:a}", ["reward.components.x", "kind=model", "kind=rule"]),
    ("reward.components.x={kind:human}", ["reward.components.x", "human", "model, rule, remote"]),
    ("model.policy.path=x", ["model.policy.path", "model.policy="]),
    ("seed=many", ["seed", "'many'", "valid integer"]),
    ("seed=1.5", ["seed", "1.5", "valid integer"]),
    ("seed=true", ["seed", "True", "valid integer"]),
    ("seed=-1", ["seed", "-1", "greater than or equal to 0"]),
    ("seed=12345678901234567890123456", ["seed", "got 12345678901234567890123456", f"{2**63 - 1}"]),
    (f"evaluate.seed={2**63}", ["evaluate.seed", f"got {2**63}", f"{2**63 - 1}"]),
    ("iterations=0", ["iterations", "got 0", "greater than 0"]),
    ("iterations=null", ["iterations", "None", "valid integer"]),
    ("update.learning_rate=fast", ["update.learning_rate", "'fast'", "valid number"]),
    ("update.learning_rate=0", ["update.learning_rate", "got 0", "greater than 0"]),
    ("update.learning_rate=nan", ["update.learning_rate", "nan", "finite number"]),
    ("update.learning_rate=inf", ["update.learning_rate", "inf", "finite number"]),
    ("update.betas=[0.9]", ["update.betas.1", "must be given"]),
    ("update.zero_stage=4", ["update.zero_stage", "got 4", "write a number from 0 to 3, or auto"]),
    ("rollout.top_p=1.5", ["rollout.top_p", "1.5", "less than or equal to 1"]),
    ("rollout.precision=fp8", ["rollout.precision", "'fp8'", "'fp32', 'bf16' or 'fp16'"]),
    ("rollout.stop_token_ids=3", ["rollout.stop_token_ids", "got 3", "write a list"]),
    ("algorithm.estimator=ppo", ["algorithm.estimator", "'ppo'", "'reinforce++-baseline' or 'remax'"]),
    ("algorithm.kl=0.1", ["algorithm.kl", "0.1"]),
    ("algorithm.policy_loss=grpo", ["algorithm.policy_loss", "'grpo'", "gspo", "module:function"]),
    ("algorithm.gate_positive=2", ["algorithm.gate_positive=2.0", "algorithm.policy_loss=ppo", "sapo"]),
    ("algorithm.dual_clip=1", ["algorithm.dual_clip", "got 1", "greater than 1"]),
    ("data.shuffle=perhaps", ["data.shuffle", "'perhaps'", "valid boolean"]),
    ("data.prompts=''", ["data.prompts: write FILE, or data.prompts.NAME", "''"]),
    ("name='a b'", ["name", "'a b'", "letters, digits"]),
    ("reward.components.rm.weight=null", ["reward.components.rm.weight", "None", "valid number"]),
    ("rollout.engine=vlm", ["rollout.engine", "'vlm'", "transformers, vllm, or module:function"]),
    ("rollout=vllmm", ["rollout=vllmm", "no such option", "transformers"]),
    ("update=zero4", ["update=zero4", "cpu, ", "did you mean 'zero"]),
    ("tracking=null", ["tracking=None", "here: tracking=none"]),
    ("reward=[model,rule]", ["reward=", "legal: environment, model, remote, rule"]),
    ("experimnt=quickstart", ["experimnt", "did you mean 'experiment'"]),
    ("model=llama", ["model", "model.policy=VALUE"]),
    ("~update.epochs", ["~update.epochs", "cannot be deleted", "another value"]),
    ("seed=1,2", ["seed=1,2", "one value per key"]),
    ("seed=range(1,3)", ["seed=range(1,3)", "one value per key"]),
    ("seed", ["'seed'", "KEY=VALUE"]),
    ("name=a=b", ["'name=a=b'", "quote"]),
    ("run_dir=${nowhere}", ["nowhere"]),
    ("model.policy=???", ["model.policy", "must be given"]),
    ("model.policy=absent", ["model.policy", "absent", "give a Hugging Face model directory"]),
    ("data.prompts=absent.jsonl", ["data.prompts", "absent.jsonl", "no such file"]),
    ("model.reference=absent", ["model.reference", "absent"]),
    ("reward.components.rm.path=absent", ["reward.components.rm.path", "absent"]),
    # contradictions
    ("data.tools_column=prompt", ["data.tools_column=prompt", "is data.prompt_column too", "null for none"]),
    (
        "model.chat_template_arguments={messages: 1}",
        ["model.chat_template_arguments.messages", "is set by the program itself"],
    ),
    ("rollout.num_shards=3", ["rollout.num_shards=3", "must divide data.prompts_per_iteration=8"]),
    ("update.minibatches=3", ["update.minibatches=3", "must divide the 8 responses", "give 2"]),
    ("data.max_prompt_tokens=64", ["data.max_prompt_tokens=64", "legal: 1 to 63"]),
    ("rollout.max_new_tokens=64", ["rollout.max_new_tokens=64", "legal: 1 to 63"]),
    ("algorithm.clip_range_low=1", ["algorithm.clip_range_low=1.0", "give less"]),
    ("rollout.stop_token_ids=[1,258]", ["rollout.stop_token_ids=258", "legal: 0 to 257"]),
    ("rollout.stop_token_ids=[-1]", ["rollout.stop_token_ids.0", "-1", "greater than or equal to 0"]),
    ("rollout.device_map=nonsense", ["rollout.device_map", "'nonsense'", "auto, balanced", "cuda:0"]),
    ("reward.device_map=cuda:x", ["reward.device_map", "'cuda:x'", "auto, balanced", "cuda:0"]),
    ("reward.components={}", ["reward.components", "must be given", "reward=model"]),
    ("data.max_dropped=50", ["data.max_dropped", "got 50", "less than or equal to 1"]),
    ("data.columns=answer", ["data.columns", "'answer'", "write a list"]),
    ("rollout.temperature=true", ["rollout.temperature", "True", "valid number"]),
    ("update.betas=[0.9,1.0]", ["update.betas.1", "1.0", "less than 1"]),
    ("reward.components.rm.path=INPUTS/policy", ["reward.components.rm.path", "policy", "2 outputs"]),
    ("update.device_map=auto", ["unknown key 'device_map' in update", "did you mean rollout.device_map"]),
    ("algorithm=grpo", ["rollout.samples_per_prompt=1", "at least 2"]),
    ("evaluate.every=1", ["evaluate.every=1", "data.heldout=FILE", "0"]),
    ("model.context_length=65", ["model.context_length=65", "64 tokens only"]),
    ("reward.components.rm.normalization={mean:0.5}", ["rm.normalization", "mean=0.5", "mean and std"]),
    (
        "reward.components.rm.normalization={}",
        ["rm.normalization", "give mean and std, or reference_samples"],
    ),
    (
        "reward.components.rm.normalization={mean:0,std:1,reference_samples:tests/support/tiny.py}",
        ["rm.normalization.reference_samples", "tiny.py", "not both"],
    ),
    ("reward.components.rm.separator=x", ["rm.separator=x", "rm.steps=separator, and that is null"]),
    ("reward.components.rm.step_score=probability", ["rm.step_score", "rm.steps=turns or separator"]),
    (
        "reward.components.rm={kind: model, path: INPUTS/reward_model, steps: turns, step_token: x, "
        "engine: transformers}",
        ["rm.step_token=x", "rm.steps=separator, and that is turns", "leave this out"],
    ),
    (
        "reward.components.rm={kind: model, path: INPUTS/reward_model, steps: turns, engine: vllm}",
        ["rm.steps=turns", "vllm gives a score for a whole response", "set reward.components.rm.engine"],
    ),
    (
        "reward.components.rm={kind: model, path: INPUTS/reward_model, steps: turns, engine: transformers, "
        "normalization: {reference_samples: tests/support/tiny.py}}",
        ["rm.normalization.reference_samples", "scores of whole responses", "give mean and std"],
    ),
    (
        "reward.components.rm={kind: model, path: INPUTS/policy, steps: turns, engine: transformers}",
        ["rm.path", "is a LlamaForCausalLM", "ForSequenceClassification"],
    ),
    (
        "reward.components.x={kind: rule, function: 'a:b', steps: separator}",
        ["reward.components.x.steps", "'separator'", "turns", "characters"],
    ),
    (
        "reward.components.x={kind: rule, function: 'a:b', separator: x}",
        ["reward.components.x.separator", "unknown key"],
    ),
    ("algorithm.kl.straight_through=true", ["algorithm.kl.straight_through", "algorithm.kl.placement=loss"]),
    (
        "algorithm.kl={placement: loss, estimator: k1}",
        ["algorithm.kl.estimator=k1", "zero on average", "for k3", "algorithm.kl.straight_through=true"],
    ),
    ("algorithm.shaping.filter_groups=true", ["filter_groups=True", "estimator=gae", "grpo", "rloo"]),
    (
        "algorithm.kl={controller: adaptive, coef: 0, reference_in: reward}",
        ["algorithm.kl.controller=adaptive", "coef=0"],
    ),
    ("algorithm.kl={reference_in: update, coef: 0}", ["algorithm.kl.reference_in=update", "coef=0"]),
    ("algorithm.shaping.overlong_penalty=0.5", ["overlong_penalty=0.5", "algorithm.shaping.overlong_buffer"]),
    ("evaluate.pass_at=[2]", ["evaluate.pass_at=(2,)", "evaluate.samples_per_prompt=N"]),
    ("evaluate.command_every=2", ["evaluate.command_every=2", "give evaluate.command=[...]"]),
    ("evaluate.command='echo \\'{policy}'", ["evaluate.command", "No closing quotation"]),
    ("evaluate.best=eval/acc", ["evaluate.best=eval/acc", "evaluate.command"]),
    ("evaluate.best=reward/mean", ["evaluate.best=reward/mean", "evaluate/NAME/reward", "eval/NAME"]),
    (
        "data.heldout={reward: INPUTS/heldout.jsonl}",
        ["data.heldout=reward", "evaluate/reward is another metric"],
    ),
    ("data.heldout.easy=absent.jsonl", ["data.heldout.easy", "absent.jsonl", "no such file"]),
    ("data.heldout=[a]", ["data.heldout", "['a']", "data.heldout.NAME=FILE"]),
    ("data.heldout.easy=null", ["data.heldout", "easy is None"]),
    ("update.attention=flash_attention_2", ["update.attention=flash_attention_2", "precision", "bf16"]),
    ("algorithm.shaping.overlong_buffer=13", ["overlong_buffer=13", "rollout.max_new_tokens=12"]),
    (
        "algorithm.correction={mode: mask, low: 3.0}",
        ["algorithm.correction.low=3.0", "below algorithm.correction.high=2.0"],
    ),
]

COMMAND_MISTAKES = [
    # evaluate.command with a list of words or a text, other overrides, what the message must hold
    ("[echo,a,'{output}']", [], ["evaluate.command=echo a {output}", "lacks {policy}"]),
    (
        "'echo {policy} {out_put} {output}'",
        [],
        ["unknown {out_put}", "legal: {policy}, {output}, {iteration}, {seed}", "did you mean {output}"],
    ),
    ("[no-such-program,'{policy}','{output}']", [], ["evaluate.command=no-such-program", "no such program"]),
    (
        "[echo,'{policy}','{output}']",
        ["evaluate.command_seconds=14400"],
        ["evaluate.command_seconds=14400", "scheduler.time_limit"],
    ),
    (
        "[echo,'{policy}','{output}']",
        ["evaluate.every=1"],
        ["evaluate.every=1", "needs data.heldout=FILE", "set it to 0"],
    ),
]


@pytest.mark.parametrize(("command", "more", "parts"), sample(COMMAND_MISTAKES, 1 / 2))
def test_a_mistake_of_a_command_is_said_in_a_line(inputs, tmp_path, command, more, parts):
    words = (f"evaluate.command={command}", "evaluate.command_every=1", *more)
    (line,) = refusal(inputs, tmp_path, *words)
    for part in parts:
        assert part in line


SLURM_MISTAKES = [
    # of scheduler=slurm: override, what the message must hold
    ("scheduler.reward.time=90", ["scheduler.reward.time", "got 90", "HH:MM:SS", "in quotes"]),
    ("scheduler.reward.time=4h", ["scheduler.reward.time", "'4h'", "HH:MM:SS"]),
    ("scheduler.reward.partiton=rm", ["scheduler.reward.partiton", "did you mean 'partition'"]),
    ("+scheduler.reward.gpu_per_node=1", ["scheduler.reward.gpu_per_node", "did you mean 'gpus_per_node'"]),
    ("scheduler.linger_maxx=3", ["scheduler.linger_maxx", "did you mean 'linger_max'"]),
    ("scheduler.workers=false", ["unknown key 'workers'", "here: scheduler.rollout.linger and "]),
    ("scheduler.horizon=2", ["unknown key 'horizon'", "here: scheduler.rollout.linger and "]),
    ("scheduler.slots=3", ["scheduler.slots", "unknown key 'slots'", "legal: account"]),
    ("scheduler.reward.slots=3", ["scheduler.reward.slots", "unknown key 'slots'", "partition"]),
    ("scheduler.reward=rm", ["scheduler.reward", "'rm'", "holds several keys", "partition"]),
    ("scheduler.kind=pbs", ["scheduler", "'pbs'", "'local', 'slurm'"]),
    ("scheduler=slurmm", ["scheduler=slurmm", "did you mean 'slurm'"]),
    ("scheduler.reward.gpus_per_node=a100", ["gpus_per_node", "'a100'", "a100:4"]),
    ("scheduler.reward.gpus_per_node=0", ["gpus_per_node", "'0'", "COUNT"]),
    ("scheduler.reward.gpus_per_node=true", ["gpus_per_node", "True", "COUNT"]),
    ("scheduler.reward.mem=16GB", ["scheduler.reward.mem", "'16GB'", "64G"]),
    ("scheduler.reward.mem=16", ["scheduler.reward.mem", "got 16", "64G"]),
    ("scheduler.reward.partition='a b'", ["scheduler.reward.partition", "'a b'", "letters"]),
    ("scheduler.account='a;b'", ["scheduler.account", "'a;b'", "letters"]),
    ("scheduler.reward.cpus_per_task=0", ["scheduler.reward.cpus_per_task", "got 0", "greater than 0"]),
    ("scheduler.reward.environment={A-B:x}", ["scheduler.reward.environment.A-B", "'A-B'"]),
    ("scheduler.reward.options={--exclusive:true}", ["scheduler.reward.options", "'--exclusive'"]),
    ("scheduler.dependency=afterok", ["scheduler.dependency", "0 and false: a job for each task"]),
    ("scheduler.setup=module", ["scheduler.setup", "'module'", "write a list"]),
    ("scheduler.reward.gres=gpu:1", ["scheduler.reward.gres=gpu:1", "gpus_per_node=1", "not both"]),
    ("scheduler.reward.nodes=2", ["scheduler.reward.nodes=2", "only the update", "rollout.num_shards"]),
    ("scheduler.driver.ntasks_per_node=2", ["scheduler.driver.ntasks_per_node=2", "only the update"]),
    ("scheduler.reward.signal=14400", ["scheduler.reward.signal=14400", "time=4:00:00", "give less"]),
    ("scheduler.update.array_parallelism=2", ["scheduler.update.array_parallelism=2", "leave it out"]),
]


@pytest.mark.parametrize(
    ("override", "parts"), SLURM_MISTAKES, ids=[override for override, _ in SLURM_MISTAKES]
)
def test_a_mistake_of_slurms_resources_is_named_too(inputs, tmp_path, override, parts):
    (line,) = refusal(inputs, tmp_path / "run", "scheduler=slurm", override)
    assert [part for part in parts if part not in line] == [], line


def test_a_time_that_yaml_took_for_a_number_is_answered_with_quotes(inputs, tmp_path):
    (tmp_path / "mine/scheduler").mkdir(parents=True)
    (tmp_path / "mine/scheduler/ours.yaml").write_text("kind: slurm\nreward:\n  time: 4:00:00\n")
    (line,) = refusal(inputs, tmp_path / "run", "scheduler=ours", config_dir=tmp_path / "mine")
    assert line.startswith("scheduler.reward.time: write D-HH:MM:SS or HH:MM:SS, in quotes")
    assert line.endswith("(got 14400)")


def test_partitions_are_a_list_or_text(inputs, tmp_path):
    words = tiny.overrides(inputs, tmp_path / "run", "scheduler=slurm")
    for partitions in ("'rm,spare'", "[rm,spare]"):
        composed = compose([*words, f"scheduler.reward.partition={partitions}"])
        assert composed.scheduler.reward.partition == ("rm", "spare")
        assert from_mapping(yaml.safe_load(to_yaml(composed))) == composed


@pytest.mark.parametrize(
    ("words", "alone"),
    [
        ([], {"prepare", "benchmark"}),
        (["scheduler.rollout.linger=0"], {"prepare", "benchmark"}),
        (["scheduler.rollout={linger: 0, start_early: false}"], {"prepare", "benchmark", "rollout"}),
        (ALONE, {"prepare", "benchmark", "rollout", "reward", "update", "evaluate"}),
        (["scheduler.prepare.linger=60", "scheduler.benchmark.linger=60"], {"prepare"}),
    ],
)
def test_a_stage_that_neither_lingers_nor_starts_early_has_a_job_for_each_task(words, alone):
    scheduler = compose(["experiment=quickstart", "scheduler=slurm", *words]).scheduler
    stages = set(SLURM_STAGES) - {"driver"}
    assert {stage for stage in stages if resources_of(scheduler, stage).does_one_task} == alone


@pytest.mark.parametrize(
    ("stage", "key", "default"),
    [("driver", "time", "0:15:00"), ("evaluate", "start_early", False), ("benchmark", "linger", 0)],
)
def test_a_stage_keeps_its_own_defaults_beside_what_it_is_given(stage, key, default):
    words = ["experiment=quickstart", "scheduler=slurm", f"scheduler.{stage}.partition=small"]
    given = getattr(compose(words).scheduler, stage)
    assert (given.partition, getattr(given, key)) == (("small",), default)


@pytest.mark.parametrize(("word", "mode"), [("tracking=none", "disabled"), ("tracking=wandb", "auto")])
def test_the_way_to_track_that_is_asked_for_is_taken_instead_of_that_of_an_experiment(word, mode):
    assert compose(["experiment=quickstart"]).tracking.wandb.mode == "offline"
    assert compose(["experiment=quickstart", word]).tracking.wandb.mode == mode


def test_the_quickstart_composes_for_a_cluster_of_ones_own():
    composed = compose(["experiment=quickstart", "scheduler=devcluster"])
    stages = ("rollout", "reward", "update", "driver")
    partitions = [getattr(composed.scheduler, stage).partition for stage in stages]
    assert partitions == [("rollout",), ("reward",), ("update",), ("cpu",)]


TRIED = sample(MISTAKES, 1 / 3)


@pytest.mark.parametrize(("override", "parts"), TRIED, ids=[override for override, _ in TRIED])
def test_a_mistake_is_named_with_its_value_and_what_is_legal(inputs, tmp_path, override, parts):
    lines = refusal(inputs, tmp_path / "run", override.replace("INPUTS", str(inputs)))
    assert len(lines) == 1, lines
    assert [part for part in parts if part not in lines[0]] == [], lines[0]
    assert list(tmp_path.iterdir()) == []


def test_half_precision_without_zero_is_refused(inputs, tmp_path):
    (line,) = refusal(inputs, tmp_path / "run", "update.precision=bf16", "update.zero_stage=0")
    assert "update.precision=bf16" in line
    assert "update.zero_stage to 1, 2 or 3" in line


@pytest.mark.parametrize("flags", [[], ["-O"]])
def test_every_mistake_of_a_kind_is_reported_at_once_with_exit_code_2(inputs, tmp_path, environment, flags):
    overrides = tiny.overrides(inputs, tmp_path / "run", "seed=-1", "iterations=0", "rollout.top_p=7")
    command = [sys.executable, *flags, "-m", "pipeline", "run", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert sorted(line.split(":")[1].strip() for line in errors) == [
        "iterations",
        "rollout.top_p",
        "seed",
    ]
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("estimator", ["gae", "remax", "reinforce++"])
def test_groups_are_filtered_only_for_estimators_that_learn_nothing_from_flat_ones(
    inputs, tmp_path, estimator
):
    words = [f"algorithm.estimator={estimator}", "rollout.samples_per_prompt=2"]
    (line,) = refusal(inputs, tmp_path / "run", *words, "algorithm.shaping.filter_groups=true")
    assert f"algorithm.estimator={estimator} learns from groups of equal rewards too" in line
    words = ["algorithm.estimator=rloo", "rollout.samples_per_prompt=2"]
    resolve(compose(tiny.overrides(inputs, tmp_path / "run", *words, "algorithm.shaping.filter_groups=true")))


def test_an_empty_mapping_takes_the_place_of_what_was_there(inputs, tmp_path):
    words = tiny.overrides(inputs, tmp_path / "run", "reward.components={}")
    rule = "reward.components.length={kind: rule, function: length_penalty}"
    composed = compose([*words, rule, "algorithm.kl.coef=0.5", "++algorithm.kl={ }"])
    assert list(composed.reward.components) == ["length"]
    assert composed.algorithm.kl.coef == 0.05


@pytest.mark.parametrize("device", ["auto", "balanced_low_0", "cpu", "cuda", "cuda:1"])
def test_devices_that_transformers_knows_are_taken(inputs, tmp_path, device):
    words = tiny.overrides(inputs, tmp_path / "run", f"rollout.device_map={device}")
    assert compose(words).rollout.device_map == device


def test_a_response_as_long_as_the_context_is_refused_also_where_prompts_are_short(inputs, tmp_path):
    words = ["data.max_prompt_tokens=8", "rollout.max_new_tokens=64"]
    (line,) = refusal(inputs, tmp_path / "run", *words)
    assert line.startswith("rollout.max_new_tokens=64: leaves no room for a prompt")
    vllm = ["rollout=vllm", "rollout.vllm.max_model_len=32", "data.max_prompt_tokens=8"]
    (line,) = refusal(inputs, tmp_path / "run", *vllm, "rollout.max_new_tokens=40", "rollout.engine=vllm")
    assert line.startswith("rollout.vllm.max_model_len=32: leaves no room for a prompt")


def test_several_contradictions_are_reported_at_once(inputs, tmp_path):
    lines = refusal(inputs, tmp_path, "rollout.num_shards=3", "update.minibatches=5", "evaluate.every=1")
    assert [line.split("=")[0] for line in lines] == [
        "rollout.num_shards",
        "update.minibatches",
        "evaluate.every",
    ]


def test_what_must_be_given_is_listed(tmp_path):
    with pytest.raises(ConfigError) as refused:
        compose(["reward=model"])
    keys = [line.split(":")[0] for line in str(refused.value).splitlines()]
    assert keys == ["data.prompts", "model.policy", "reward.components.rm.path"]


def test_a_run_without_a_reward_is_told_the_choices(inputs, tmp_path):
    overrides = [text for text in tiny.overrides(inputs, tmp_path) if not text.startswith("reward")]
    with pytest.raises(ConfigError, match=r"reward.components: .*reward=model, reward=remote, reward=rule"):
        compose(overrides)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", None, "holds no *.safetensors"),
        ("config.json", None, "holds no config.json"),
        ("config.json", "{broken", "is not JSON"),
        ("config.json", "[]", "is not JSON"),
    ],
)
@pytest.mark.parametrize("key", ["model.policy", "reward.components.rm.path"])
def test_a_directory_that_is_no_model_is_named(inputs, tmp_path, key, name, content, said):
    folder = tmp_path / "model"
    shutil.copytree(inputs / ("policy" if key == "model.policy" else "reward_model"), folder)
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    (line,) = refusal(inputs, tmp_path / "run", f"{key}={folder}")
    assert line.startswith(f"{key}={folder}: ")
    assert said in line


def test_a_model_without_a_length_needs_one(inputs, tmp_path):
    folder = Path(shutil.copytree(inputs / "policy", tmp_path / "model"))
    model = json.loads((folder / "config.json").read_text())
    del model["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(model))
    (line,) = refusal(inputs, tmp_path / "run", f"model.policy={folder}")
    assert line.startswith("model.context_length: must be given")
    given_length = [f"model.policy={folder}", "model.context_length=48"]
    assert (
        resolve(compose(tiny.overrides(inputs, tmp_path / "run", *given_length))).data.max_prompt_tokens == 36
    )


# --- the user's own groups ---


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("learnig_rate: 1e-4\n", "did you mean 'learning_rate'"),
        ("epsilon: fast\n", "update.epsilon"),
        ("learning_rate: [1\n", "update/mine.yaml"),
        ("- 1\n- 2\n", "update/mine"),
        ("\tepochs: 1\n", "update/mine.yaml"),
    ],
)
def test_a_typo_in_a_file_of_the_users(inputs, tmp_path, content, said):
    (tmp_path / "mine/update").mkdir(parents=True)
    (tmp_path / "mine/update/mine.yaml").write_text(content)
    lines = refusal(inputs, tmp_path / "run", "update=mine", config_dir=tmp_path / "mine")
    assert len(lines) == 1
    assert said in lines[0]


def test_a_folder_of_groups_that_is_not_there(inputs, tmp_path):
    (line,) = refusal(inputs, tmp_path / "run", config_dir=tmp_path / "absent")
    assert line == f"--config-dir {tmp_path / 'absent'}: no such directory"


@pytest.mark.parametrize("folder", ["mine", "my groups", "it's $HOME"])
def test_groups_of_ones_own_are_found_and_come_first(inputs, tmp_path, folder):
    mine = tmp_path / folder
    for group, option, content in (
        ("update", "mine", "epochs: 7\n"),
        ("update", "cpu", "epochs: 9\n"),  # instead of the packaged one
        ("model", "tiny", f"policy: {inputs / 'policy'}\n"),  # a group that has no packaged option
    ):
        (mine / group).mkdir(parents=True, exist_ok=True)
        (mine / group / f"{option}.yaml").write_text(content)
    overrides = [text for text in tiny.overrides(inputs, tmp_path / "run") if "update.epochs" not in text]
    for option, epochs in (("mine", 7), ("cpu", 9), ("zero2", 1)):
        composed = compose([*overrides, f"update={option}", "model=tiny"], mine)
        assert composed.update.epochs == epochs


@pytest.mark.parametrize(
    ("group", "option"),
    [(group, option) for group, options in known_groups(None).items() for option in options],
)
def test_every_packaged_option_composes(inputs, tmp_path, group, option):
    overrides = [text for text in tiny.overrides(inputs, tmp_path / "run") if not text.startswith("tracking")]
    if group == "reward":
        overrides = [text for text in overrides if not text.startswith("reward")]
        rest = {"model": "components.rm.path=x", "rule": "components.rule.function=a:b"}
        rest |= {"remote": "components.remote.url=http://a/b", "teacher": "teachers.teacher.path=x"}
        overrides += [f"reward.{rest[option]}"] if option in rest else []
    compose([*overrides, f"{group}={option}"])


def table_of(page: str, first: str) -> list[list[str]]:
    """Cells of the rows of the table whose head begins with a cell."""
    rows = [line.strip("|").split("|") for line in (ROOT / "docs" / page).read_text().split("\n")]
    cells = [[cell.strip().replace("`", "") for cell in row] for row in rows]
    start = next(number for number, row in enumerate(cells) if row[0] == first)
    return list(itertools.takewhile(lambda row: len(row) > 1, cells[start + 2 :]))


def test_the_page_on_algorithms_says_what_the_presets_do():
    told = {
        name: row[1:] for row in table_of("howto/algorithm.md", "algorithm") for name in row[0].split(", ")
    }
    assert sorted(told) == sorted(known_groups(None)["algorithm"])
    for name, (samples, critic, kl) in told.items():
        algorithm = compose([*COMPLETE, f"algorithm={name}"]).algorithm
        where = {KLPlacement.REWARD: "subtracted from the reward", KLPlacement.LOSS: "in the loss"}
        assert kl == (where[algorithm.kl.placement] if algorithm.kl.coef else "none"), name
        assert (critic == "yes") is (algorithm.estimator is Estimator.GAE), name
        assert samples.startswith("more than 1" if algorithm.estimator in GROUP_ESTIMATORS else "any"), name


def test_the_table_of_defaults_is_that_of_the_code():
    mapping = to_mapping(compose([*COMPLETE]))
    rows = table_of("howto/algorithm.md", "key")
    assert len(rows) > 20
    for key, ours, *_ in rows:
        found = functools.reduce(lambda part, name: part[name], key.split("."), mapping)
        told = yaml.safe_load(ours.split(";")[0].split(":")[0])
        assert found == (float(told) if isinstance(found, float) else told), key


# --- the dataclasses ---


@pytest.mark.parametrize("module", [config_module, schedulerconfig])
def test_every_key_is_described_right_below_it(module):
    tree = ast.parse(Path(module.__file__).read_text())
    silent = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or not node.decorator_list:
            continue
        assert ast.get_docstring(node), node.name
        for field, below in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                silent += [] if is_text else [f"{node.name}.{field.target.id}"]
    assert silent == []
    assert len(dataclasses.fields(Config)) > 10


@functools.cache
def composed_once(inputs: Path) -> str:
    return json.dumps(to_mapping(compose(tiny.overrides(inputs, inputs / "run"))))


def composed(inputs: Path) -> dict:
    """A mapping to change; Hydra takes its time."""
    return json.loads(composed_once(inputs))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**63 - 1),
    rate=st.floats(1e-12, 1e3),
    betas=st.tuples(*[st.floats(0.01, 1, exclude_max=True)] * 2),
    weight=st.floats(-1e6, 1e6),
    column=st.none() | st.text(min_size=1, max_size=8),
    stops=st.lists(st.integers(0, 10**6), max_size=3),
    estimator=st.sampled_from(["gae", "grpo", "rloo"]),
)
def test_a_frozen_configuration_is_read_back_as_it_was(
    inputs, seed, rate, betas, weight, column, stops, estimator
):
    mapping = composed(inputs)
    mapping["seed"] = seed
    mapping["update"] |= {"learning_rate": rate, "betas": list(betas)}
    mapping["reward"]["components"]["rm"]["weight"] = weight
    mapping["data"]["id_column"] = column
    mapping["rollout"]["stop_token_ids"] = stops
    mapping["algorithm"]["estimator"] = estimator
    config = from_mapping(mapping)
    assert from_mapping(yaml.safe_load(to_yaml(config))) == config
    assert (config.seed, config.update.learning_rate, config.data.id_column) == (seed, rate, column)


def test_paths_become_absolute_and_lengths_are_filled_in(inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(inputs)
    overrides = tiny.overrides(Path(), Path("run"))
    config = resolve(compose(overrides))
    assert config.model.policy == str(inputs / "policy")
    assert config.run_dir == str(inputs / "run")
    assert (config.model.context_length, config.data.max_prompt_tokens) == (64, 52)
    assert not (inputs / "run").exists()


@pytest.mark.parametrize("name", ["two_gpu_types", "preemptible", "four_hours"])
def test_the_example_configurations_compose(inputs, tmp_path, name):
    words = tiny.overrides(inputs, tmp_path / "run", f"scheduler={name}")
    config = resolve(compose(words, ROOT / "examples" / "slurm"))
    assert config.scheduler.kind == "slurm"
    assert config.scheduler.rollout.partition != config.scheduler.driver.partition


# --- options over those of an experiment ---

RULE = ("reward=rule", "reward.components.rule.function=exact_match")


def test_another_reward_over_an_experiments_replaces_its_components():
    """quickstart gives a reward model a path; with reward=rule nothing says that there is one."""
    assert list(compose(["experiment=quickstart"]).reward.components) == ["rm"]
    assert list(compose(["experiment=quickstart", *RULE]).reward.components) == ["rule"]
    again = compose(["experiment=quickstart", "reward=model", "reward.components.rm.weight=2"])
    assert again.reward.components["rm"].path.endswith("reward_model")


def test_what_is_named_beside_it_stays():
    both = compose(
        ["experiment=quickstart", *RULE, "reward.components.rm.kind=model", "reward.components.rm.weight=2"]
    )
    assert sorted(both.reward.components) == ["rm", "rule"]


def test_an_experiment_of_ones_own_is_no_other(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /reward: rule\nreward:\n  components:\n    mine:\n"
    (tmp_path / "experiment" / "own.yaml").write_text(f"{text}      arguments: {{a: 1}}\n")
    given = ["model.policy=p", "data.prompts=d", "experiment=own"]
    model = compose([*given, "reward=model", "reward.components.rm.path=r"], tmp_path)
    assert list(model.reward.components) == ["rm"]
    with pytest.raises(ConfigError, match=r"reward.components.mine: has no kind, only arguments"):
        compose([*given, RULE[1]], tmp_path)


# --- everything at once ---


def test_mistakes_of_every_kind_are_named_in_one_go_each_in_a_line(inputs, tmp_path):
    lines = refusal(
        inputs,
        tmp_path / "run",
        *("updte.epochs=2", "rollout.top_p=1.5", "iterations=0", "update.learning_rat=1"),
        *(f"model.reference={tmp_path / 'absent'}", "data.prompts=absent.jsonl", "update.minibatches=3"),
        "reward.components.other={kind: rule}",
    )
    assert [line.split(":")[0].split("=")[0] for line in lines] == [
        *("updte.epochs", "update.learning_rat"),  # unknown
        *("reward.components.other.function", "iterations", "rollout.top_p"),  # missing, wrong
        *("model.reference", "data.prompts", "update.minibatches"),
    ]
    assert "did you mean 'update'" in lines[0]
    assert "did you mean 'learning_rate'" in lines[1]


def test_a_misspelt_section_of_a_file_is_not_said_to_be_missing(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nmodle:\n  policy: p\ndata:\n  prompts: d\n  prompt_colum: q\nsed: 1\n"
    (tmp_path / "experiment" / "own.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        compose(["experiment=own", "reward=rule"], tmp_path)
    lines = str(refused.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *("data.prompt_colum", "modle", "sed"),
        "reward.components.rule.function",
    ]
    assert "did you mean 'model'" in lines[1]


@pytest.mark.parametrize(
    "word", ["rollout.sample_per_prompt=8", "rollout.samples_per_prompt=many", "experimnt=mine"]
)
def test_what_only_follows_from_a_mistake_is_not_said(inputs, tmp_path, word):
    """With the default in its place, the number of samples would contradict the algorithm."""
    (line,) = refusal(inputs, tmp_path / "run", "algorithm=grpo", "update.minibatches=3", word)
    assert line.startswith(word.split("=")[0])


def test_what_a_check_says_of_a_file_that_is_not_there_follows_too():
    found = Findings()
    found.add(["data.prompts=/d/rows.jsonl: no such file or directory"])
    found.add(["/d/rows.jsonl does not exist", "data.prompts: is empty", "seed=1: too few of data.prompts=3"])
    found.add(["/d/rows.jsonl2 does not exist", "data.prompts_per_iteration=0: too few", "data=1: x"])
    with pytest.raises(ConfigError) as refused:
        found.refuse()
    assert [line.split(" ")[0] for line in str(refused.value).splitlines()] == [
        *("data.prompts=/d/rows.jsonl:", "/d/rows.jsonl2", "data.prompts_per_iteration=0:", "data=1:")
    ]
