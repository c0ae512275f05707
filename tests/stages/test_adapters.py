"""Engines and adapters: put on the base where an engine can, else merged on the node, to the same bytes."""

import errno
import gc
import re
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

from pipeline.config.schema import Config
from stages.engines import make_generator
from stages.engines.base import CannotAdapt, Request, Response, Sampling, takes_adapters
from stages.merging import merged_folder
from tests.support import naive_engine
from tests.support.adapters import make_adapter
from tests.support.processes import config_of

REQUESTS = [Request([2 + i, 7, 30 + i], 12, seed=100 + i) for i in range(6)]
NAIVE = "rollout.engine=tests.support.naive_engine:make_generator"
HESITANT = "rollout.engine=tests.stages.test_adapters:make_hesitant"


@takes_adapters
def make_hesitant(config, directory, adapter=None):
    """An engine that takes adapters, but none of this model."""
    if adapter is not None:
        raise CannotAdapt("it has a layer that I do not know")
    return naive_engine.make_generator(config, directory)


@pytest.fixture(scope="module")
def adapter(models, tmp_path_factory) -> Path:
    return make_adapter(models / "policy", tmp_path_factory.mktemp("adapter") / "adapter")


@pytest.fixture
def node(tmp_path, monkeypatch) -> Path:
    """The node's temporary folder."""
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def generated(config: Config, adapter: Path | None) -> list[Response]:
    made = make_generator(config, config.model.policy, adapter and str(adapter))
    return made.generate(REQUESTS, Sampling())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_adapter_merged_in_memory_gives_the_bytes_of_a_merged_model(
    models, adapter, node, tmp_path, precision
):
    words = [f"update.precision={precision}", "update.zero_stage=1"]
    in_memory = generated(config_of(models, tmp_path / "run", *words), adapter)
    merged = generated(config_of(models, tmp_path / "run", *words, "rollout.merge_adapters=true"), adapter)
    assert in_memory == merged
    assert in_memory != generated(config_of(models, tmp_path / "run", *words), None)


def test_a_policy_that_generates_in_another_format_than_it_learns_in_is_rounded_to_that_first(
    models, adapter, node, tmp_path
):
    words = ["update.precision=bf16", "update.zero_stage=1", "rollout.precision=fp32"]
    config = config_of(models, tmp_path / "run", *words)
    folder = merged_folder(config, Path(config.model.policy), adapter)
    loaded = make_generator(config, str(folder)).generate(REQUESTS, Sampling())
    assert generated(config, adapter) == loaded


@pytest.mark.parametrize("engine", [NAIVE, HESITANT])
def test_an_engine_that_takes_no_adapter_gets_a_whole_model_that_lives_as_long_as_it_does(
    models, adapter, node, tmp_path, engine
):
    config = config_of(models, tmp_path / "run", engine)
    made = make_generator(config, config.model.policy, str(adapter))
    (folder,) = node.glob("slurm-ppo-policy-*")
    assert (folder / "model.safetensors").is_file()
    plain = make_generator(config_of(models, tmp_path / "run"), config.model.policy, str(adapter))
    greedy = [Request(r.prompt_tokens, r.max_new_tokens, greedy=True) for r in REQUESTS]
    ours, theirs = made.generate(greedy, Sampling()), plain.generate(greedy, Sampling())
    assert [response.tokens for response in ours] == [response.tokens for response in theirs]
    del made
    gc.collect()
    assert list(node.iterdir()) == []


def test_an_engine_that_fails_to_start_leaves_no_model_behind(models, adapter, node, tmp_path, monkeypatch):
    def broken(config, directory):
        raise RuntimeError("no GPU")

    monkeypatch.setattr(naive_engine, "make_generator", broken)
    config = config_of(models, tmp_path / "run", NAIVE)
    with pytest.raises(RuntimeError, match="no GPU"):
        make_generator(config, config.model.policy, str(adapter))
    assert list(node.iterdir()) == []


def test_a_node_without_room_for_a_whole_model_says_so_and_may_have_some_later(
    models, adapter, node, tmp_path, monkeypatch
):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage(1000, 900, 100))
    config = config_of(models, tmp_path / "run", NAIVE)
    said = r"no room to merge the policy into a whole model \(.*, 100 bytes are free\); let TMPDIR name"
    with pytest.raises(OSError, match=said) as failure:
        make_generator(config, config.model.policy, str(adapter))
    assert failure.value.errno == errno.ENOSPC
    assert re.search(str(node), str(failure.value))
