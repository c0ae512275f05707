"""Engines and adapters: put on the base where an engine can, else merged on the node, to the same bytes."""

import errno
import gc
import re
import sys
import tempfile
from collections import namedtuple
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.config.update import Precision
from stages.engines import make_generator
from stages.engines.base import CannotAdapt, Request, Response, Sampling, takes_adapters
from stages.engines.vllm_adapters import count_adapted, put_on
from stages.files.node_folders import remove_node_folder
from stages.models.adapters import merge_into, read_adapter
from stages.models.loading import load_causal_lm
from stages.models.merging import merged_folder
from tests.support import ROOT, naive_engine
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


KILLED = """
import sys
from pathlib import Path
from stages.files.node_folders import lock_node_folder
folder = Path(sys.argv[1])
folder.mkdir()
(folder / "model.safetensors").touch()
lock_node_folder(folder)
print("locked", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_has_merged_is_removed_by_the_next_and_what_one_uses_is_not(
    models, adapter, node, tmp_path
):
    config = config_of(models, tmp_path / "run")
    used = merged_folder(config, Path(config.model.policy), adapter)
    other = node / "slurm-ppo-policy-other"
    (node / "slurm-ppo-policy-new").mkdir()
    with Popen([sys.executable, "-c", KILLED, other], stdin=PIPE, stdout=PIPE, cwd=ROOT) as process:
        assert process.stdout.readline() == b"locked\n"
        remove_node_folder(merged_folder(config, Path(config.model.policy), adapter))
        assert (other / "model.safetensors").exists()
        process.kill()
        process.wait()
        remove_node_folder(merged_folder(config, Path(config.model.policy), adapter))
    assert sorted(node.iterdir()) == sorted([used, node / "slurm-ppo-policy-new"])
    assert (used / "model.safetensors").is_file()
    remove_node_folder(used)


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


def test_a_model_that_lies_on_the_disk_in_parts_takes_no_adapter_in_memory(models, adapter):
    model = load_causal_lm(models / "policy", Precision.FP32, False, device_map="meta")
    with pytest.raises(CannotAdapt, match="do not fit into memory"):
        merge_into(model, read_adapter(adapter))


# --- vLLM passes over what it finds no place for ---


class Counting:
    """An engine whose workers have changed so many weights."""

    def __init__(self, *found: int) -> None:
        self._found = list(found)

    def put_on(self, adapter: Path) -> list[int]:
        return self._found


class Refusing:
    def put_on(self, adapter: Path) -> list[int]:
        raise ValueError("expected target modules in {'qkv_proj'}\nbut received ['mixer']")


ALL = 2 * 7
"""Linear layers of the two blocks of the tiny policy."""


@pytest.mark.parametrize(
    ("found", "ranks"), [((ALL,), 1), ((ALL, ALL), 2), ((ALL // 2, ALL // 2), 1)], ids=["one", "TP", "PP"]
)
def test_an_adapter_that_has_arrived_wholly_is_generated_with(adapter, found, ranks):
    put_on(Counting(*found), adapter, ranks)


@pytest.mark.parametrize(("found", "ranks"), [((0,), 1), ((ALL - 1,), 1), ((ALL, ALL - 1), 2)])
def test_an_adapter_of_which_something_is_missing_is_merged_instead(adapter, found, ranks):
    with pytest.raises(CannotAdapt, match=f"has put {sum(found)} of {ALL * ranks} parts of the adapter"):
        put_on(Counting(*found), adapter, ranks)


def test_an_adapter_that_is_refused_is_merged_instead(adapter):
    with pytest.raises(CannotAdapt, match=r"refuses the adapter: expected .* but received \['mixer'\]"):
        put_on(Refusing(), adapter, ranks=1)


def test_parts_are_counted_by_what_they_change():
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    model[0].lora_b_stacked = (torch.ones(2), torch.zeros(2), torch.ones(2))
    model[1].lora_b_stacked = (torch.zeros(2),)
    assert count_adapted(model) == 2
