"""Room for a run: computed from headers before anything is made, shown, and refused where it does not fit."""

import json
import math
import os
import shlex
import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

from pipeline.config.issue import ConfigError
from pipeline.config.schema import Config
from pipeline.config.update import LoraConfig
from pipeline.preflight import disk_need as diskneed
from pipeline.preflight.disk_need import check_disk, imagine, num_adapted
from tests.support import tiny
from tests.support.processes import config_of

SEVEN_BILLION = 7_000_000_000
ENDLESS = ("iterations=10000000000", "update.keep_last=null")
"""More states than any disk holds, also of a model of a few weights."""


def weights_file(path: Path, *shapes: list[int], names: Sequence[str] = ()) -> None:
    """A header, which is all that is looked at, and a hole of the size that it says."""
    ends = [2 * total for total in accumulate(math.prod(shape) for shape in shapes)]
    spans = [(end - 2 * math.prod(shape), end) for shape, end in zip(shapes, ends, strict=True)]
    names = names or [f"t{i}" for i in range(len(shapes))]
    tensors = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": span}
        for name, shape, span in zip(names, shapes, spans, strict=True)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + ends[-1])


@pytest.fixture
def seven_billion(inputs, tmp_path) -> Config:
    """In bf16, trained by DeepSpeed."""
    policy = tmp_path / "policy"
    policy.mkdir()
    for part in (1, 2):
        weights_file(policy / f"model-{part}-of-2.safetensors", [SEVEN_BILLION // 4], [2, SEVEN_BILLION // 8])
    # The same again, as some models have it.
    weights_file(policy / "consolidated.safetensors", [SEVEN_BILLION])
    config = config_of(inputs, tmp_path / "run", "update=zero2", "iterations=100")
    model = replace(config.model, policy=str(policy))
    return replace(config, model=model, update=replace(config.update, engine="deepspeed", keep_last=3))


def test_seven_billion_weights_with_a_critic_are_196_gb_an_iteration(seven_billion):
    state, _ = imagine(seven_billion)
    assert state.num_bytes == 2 * SEVEN_BILLION * (2 + 3 * 4) == 196 * 10**9


@pytest.mark.parametrize(
    ("free", "kept", "said"),
    [
        (785 * 10**9, {}, "(4 x 182.5 GiB)"),
        (780 * 10**9, {}, "keep fewer (update.keep_last=2), or give run_dir another place"),
        (780 * 10**9, {"keep_last": 2}, "(3 x 182.5 GiB)"),
        (500 * 10**9, {"keep_last": 2}, "train adapters only (update.lora), or give run_dir another place"),
        (10 * 10**12, {"keep_last": None}, "needs 17.8 TiB of policies"),
        (10**12, {"keep_every": 10}, "keep fewer (update.keep_last=2 update.keep_every=null)"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way_out(seven_billion, monkeypatch, free, kept, said):
    monkeypatch.setattr(diskneed, "room", lambda folder: (free, None))
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
    critic = diskneed.num_parameters(policy)
    state, _ = imagine(replace(seven_billion, update=update))
    assert state.num_bytes == critic * (2 + 3 * 4) + 2 * 16 * (one + other) * 4 * 4
    state, _ = imagine(replace(seven_billion, update=replace(update, engine="mine:make_trainer")))
    assert state.num_bytes == 2 * critic * 2, "whole models, and what else nobody knows"


def test_a_fork_needs_room_for_its_own_iterations_only(seven_billion, monkeypatch):
    monkeypatch.setattr(diskneed, "room", lambda folder: (400 * 10**9, None))
    with pytest.raises(ConfigError):
        list(check_disk(seven_billion))
    assert "2 x" in "".join(check_disk(seven_billion, start=98))


def test_long_responses_alone_are_a_warning(seven_billion, monkeypatch):
    monkeypatch.setattr(diskneed, "room", lambda folder: (785 * 10**9, None))
    longer = replace(seven_billion, data=replace(seven_billion.data, prompts_per_iteration=10**6))
    warning, told = check_disk(longer)
    assert warning.startswith("warning: run_dir: with the longest responses")
    assert told.startswith("disk: ")


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
    with pytest.raises(ConfigError, match=r"its model\.safetensors .* is cut short or not of safetensors"):
        diskneed.num_parameters(tmp_path)
