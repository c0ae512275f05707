"""Room for a run: computed from headers or measured, shown, and refused where it does not fit."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checks import disk
from pipeline.checks.disk import (
    DiskEstimate,
    Footprint,
    VersionCounts,
    check_disk,
    imagine,
    judge_need,
    judge_space,
    kept_now,
    measure,
    most_kept,
    packed_of,
    token_bytes,
)
from pipeline.checks.finding import Verdict
from pipeline.config.issue import ConfigError
from pipeline.config.schema import Config
from pipeline.config.update import LoraConfig
from pipeline.forecast.shapes import num_adapted, num_parameters
from pipeline.run.directory import load_run
from pipeline.run.plan import state_of
from tests.support import tiny
from tests.support.large_models import weights_file
from tests.support.processes import config_of

SEVEN_BILLION = 7_000_000_000
ENDLESS = ("iterations=10000000000", "update.keep_last=null")
"""More states than any disk holds, also of a model of a few weights."""


@pytest.fixture
def seven_billion(inputs, tmp_path) -> Config:
    """In bf16, trained by DeepSpeed."""
    policy = tmp_path / "policy"
    policy.mkdir()
    files = {}
    for part in (1, 2):
        file, names = f"model-{part}-of-2.safetensors", [f"layers.{part}.a", f"layers.{part}.b"]
        weights_file(policy / file, [SEVEN_BILLION // 4], [2, SEVEN_BILLION // 8], names=names)
        files |= dict.fromkeys(names, file)
    (policy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    # The same again, as some models have it.
    weights_file(policy / "consolidated.safetensors", [SEVEN_BILLION])
    config = config_of(inputs, tmp_path / "run", "update=zero2", "iterations=100")
    model = replace(config.model, policy=str(policy))
    return replace(config, model=model, update=replace(config.update, engine="deepspeed", keep_last=3))


def test_seven_billion_weights_with_a_critic_are_196_gb_an_iteration(seven_billion):
    policy, state, _ = imagine(seven_billion)
    assert policy.num_bytes == SEVEN_BILLION * 2
    assert policy.num_bytes + state.num_bytes == 2 * SEVEN_BILLION * (2 + 3 * 4) == 196 * 10**9


@pytest.mark.parametrize(
    ("free", "kept", "said"),
    [
        (785 * 10**9, {}, "(4 x 13.0 GiB) and trainer states (4 x 169.5 GiB)"),
        (780 * 10**9, {}, "keep fewer (update.keep_last=2), or give run_dir another place"),
        (780 * 10**9, {"keep_last": 2}, "(3 x 169.5 GiB)"),
        (500 * 10**9, {"keep_last": 2}, "train adapters only (update.lora), or give run_dir another place"),
        (10 * 10**12, {"keep_last": None}, "needs 17.8 TiB of policies"),
        (10**12, {"keep_every": 10}, "keep fewer (update.keep_last=2 update.keep_every=null)"),
        (
            850 * 10**9,
            {"save_every": 10},
            "(21 x 13.0 GiB) and trainer states (3 x 169.5 GiB)",
        ),
        (800 * 10**9, {"save_every": 10}, "keep fewer (update.keep_last=2 update.save_every=2)"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way_out(seven_billion, monkeypatch, free, kept, said):
    monkeypatch.setattr(disk, "room", lambda folder: (free, None))
    config = replace(seven_billion, update=replace(seven_billion.update, **kept))
    try:
        told = "\n".join(check_disk(config))
    except ConfigError as error:
        told = str(error)
        assert len(told.splitlines()) == 1
        assert len(told) <= 300
        assert told.startswith("run_dir=")
    assert said in told


def test_adapters_of_seven_billion_weights_are_a_few_hundred_megabytes(seven_billion):
    """Embedding and output layer have none; critic and optimizer count as ever."""
    policy = Path(seven_billion.model.policy)
    layers = {"q_proj": [4096, 4096], "up_proj": [11008, 4096], "norm": [4096]}
    names = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layers.items()}
    named = {"model.embed_tokens.weight": [32000, 4096], **names, "lm_head.weight": [32000, 4096]}
    for file in policy.glob("*.safetensors"):
        file.unlink()
    weights_file(policy / "model.safetensors", *named.values(), names=list(named))
    one, other = 4096 + 4096, 11008 + 4096
    assert num_adapted(policy, LoraConfig(rank=16)) == 2 * 16 * (one + other)
    assert num_adapted(policy, LoraConfig(rank=8, target_modules=("q_proj",))) == 2 * 8 * one
    update = replace(seven_billion.update, lora=LoraConfig(rank=16))
    critic = num_parameters(policy)
    policy, state, _ = imagine(replace(seven_billion, update=update))
    assert policy.num_bytes == 2 * 16 * (one + other) * 4
    assert state.num_bytes == critic * (2 + 3 * 4) + 3 * policy.num_bytes
    policy, state, _ = imagine(replace(seven_billion, update=replace(update, engine="mine:make_trainer")))
    assert policy.num_bytes == state.num_bytes == critic * 2, "whole models, and what else is not known"


def test_a_fork_needs_room_for_its_own_iterations_only(seven_billion, monkeypatch):
    monkeypatch.setattr(disk, "room", lambda folder: (400 * 10**9, None))
    with pytest.raises(ConfigError):
        list(check_disk(seven_billion))
    assert "(2 x 169.5 GiB)" in "".join(check_disk(seven_billion, start=98))


def test_long_responses_alone_are_a_warning(seven_billion, monkeypatch):
    monkeypatch.setattr(disk, "room", lambda folder: (785 * 10**9, None))
    longer = replace(seven_billion, data=replace(seven_billion.data, prompts_per_iteration=10**6))
    warning, told = check_disk(longer)
    assert warning.startswith("warning: run_dir: with the longest responses")
    assert told.startswith("disk: ")


@given(
    st.integers(1, 100), st.none() | st.integers(2, 20), st.none() | st.integers(1, 50), st.integers(1, 12)
)
def test_what_is_kept_at_once(iterations, keep_last, keep_every, save_every):
    keep_every = keep_every if keep_last else None
    policies, states, saved, most = set(), set(), [0], VersionCounts(0, 0)
    for version in range(1, iterations + 1):
        policies.add(version)
        is_due = version == iterations or (keep_every is not None and version % keep_every == 0)
        if is_due or version - saved[-1] >= save_every:
            states.add(version)
            saved.append(version)
        most = VersionCounts(max(most.policies, len(policies)), max(most.states, len(states)))
        if keep_last:
            due = {v for v in policies if keep_every and v % keep_every == 0}
            oldest = min(version - keep_last + 1, saved[-2] if len(saved) > 1 else 0)
            policies = {v for v in policies if v >= oldest} | due
            states &= policies
    found = most_kept(iterations, keep_last, keep_every, save_every)
    assert most.less(found) == VersionCounts(0, 0), "never more than is said"
    if save_every == 1:
        assert found == most
    elif not keep_every and iterations > 3 * save_every:
        assert found.less(most) in (VersionCounts(0, 0), VersionCounts(0, 1))


def test_packed_iterations_need_few_files():
    plain = DiskEstimate(Footprint(4, 2), Footprint(6, 3), Footprint(100, 400), 50, VersionCounts(3, 3), True)
    packed = replace(plain, iterations_packed=packed_of(50, 9))
    assert (plain.needed.files, packed.needed.files) == (50 * 400 + 15, 10 * 400 + 40 * 20 + 15)
    assert plain.needed.num_bytes == packed.needed.num_bytes
    assert packed_of(50, None) == packed_of(5, 9) == 0


def test_the_estimate_before_the_first_iteration_is_near_what_it_takes(complete_real_run):
    run = load_run(complete_real_run)
    measured = measure(run, 2)
    assert measured is not None
    assert kept_now(run) == VersionCounts(2, 2)
    for imagined, found in zip(imagine(run.config)[:2], measured[:2], strict=True):
        assert 0.7 < imagined.num_bytes / found.num_bytes < 1.4


def test_a_state_that_is_not_saved_yet_is_estimated(complete_real_run, tmp_path):
    """As with update.save_every=10 in the first iterations."""
    run = load_run(shutil.copytree(complete_real_run, tmp_path / "run", symlinks=True))
    for version in (1, 2):
        run.paths.task(state_of(version)).record.unlink()
    measured = measure(run, 2)
    assert measured is not None
    assert measured[1] == imagine(run.config)[1]


def test_need_is_compared_with_room():
    policy, state, shards = Footprint(1 << 30, 10), Footprint(9 << 30, 20), Footprint(1 << 20, 100)
    given = DiskEstimate(policy, state, shards, 100, VersionCounts(10, 10), is_measured=False)
    assert judge_need(given, 1 << 40, None).verdict is Verdict.OK
    assert judge_need(given, 110 << 30, None).verdict is Verdict.WARNING
    short = judge_need(given, 90 << 30, None)
    assert short.verdict is Verdict.PROBLEM
    assert "states (10 x 9.0 GiB), and only 90.0 GiB are free there" in short.measured
    measured = replace(given, is_measured=True, shards=Footprint(1 << 30, 100))
    assert judge_need(measured, 150 << 30, None).verdict is Verdict.PROBLEM, "it will take as much again"
    assert judge_need(given, 1 << 40, 9000).verdict is Verdict.PROBLEM, "inodes"
    assert judge_space("HOME", "/h", 1 << 40, 12).verdict is Verdict.PROBLEM


@pytest.mark.parametrize("command", ["validate", "run", "submit scheduler=slurm"])
def test_a_run_for_which_there_is_no_room_is_refused_before_anything_is_made(
    inputs, tmp_path, slurm_ppo, command
):
    words = [*tiny.overrides(inputs, tmp_path / "run"), *ENDLESS]
    done = slurm_ppo(*shlex.split(command), *words)
    assert done.returncode == 2
    assert any(f"run_dir={tmp_path / 'run'}: needs" in line for line in done.stderr.splitlines())
    assert "update.keep_last=2" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_cut_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(
        ConfigError, match=rf"{tmp_path} its model\.safetensors .* is cut short or not of safetensors"
    ):
        num_parameters(tmp_path)


def test_tokens_take_more_with_what_teachers_find_likely_and_experts_that_are_replayed(seven_billion):
    policy, algorithm = Path(seven_billion.model.policy), seven_billion.algorithm
    text = {"num_hidden_layers": 48, "num_experts_per_tok": 8, "num_experts": 128}
    plain = token_bytes(seven_billion)
    for experts, each in ((128, 1), (512, 2)):
        (policy / "config.json").write_text(json.dumps(text | {"num_experts": experts}))
        replayed = replace(seven_billion, algorithm=replace(algorithm, router_replay=True))
        assert token_bytes(replayed) - plain == 48 * 8 * each
    others = {"num_hidden_layers": 48, "moe_k": 6, "moe_num_experts": 64, "num_experts_per_tok": None}
    (policy / "config.json").write_text(json.dumps(others))
    assert token_bytes(replayed) - plain == 48 * 6, "as Ernie 4.5 has it"
    distillation = replace(algorithm.distillation, top_k=16)
    taught = replace(seven_billion, algorithm=replace(algorithm, distillation=distillation))
    assert token_bytes(taught) - plain == 16 * 8
