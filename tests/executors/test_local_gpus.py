"""The GPUs of one machine: who gets which, who makes place, and what is refused. They are only pretended."""

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.compose import compose
from pipeline.config.issue import ConfigError
from pipeline.config.resolve import resolve
from pipeline.config.scheduler import LocalConfig
from pipeline.decide.staying import ALWAYS
from pipeline.executors.devices import Devices, devices_of, listed_gpus, parse_list, parts
from pipeline.executors.limits import Limits, Share, need_of, node_of
from pipeline.executors.local_limits import gpus_of_tasks, local_limits
from tests.support import noting, tiny
from tests.support.composed import composed_of
from tests.support.killing import assert_same_end

# --- who gets what ---


def test_the_fullest_node_with_room_is_taken():
    limits = Limits(
        {}, 60, nodes=(node_of("a", 2, 8), node_of("b", 1, 8)), gpus={"a": ("0", "1"), "b": ("2",)}
    )
    limits = replace(
        limits, needs={"one": need_of(1, 2), "two": need_of(1, 0, 0, 2), "more": need_of(2, 0, 0, 2)}
    )
    assert limits.grant("one", []) == (Share("b", ("2",)),)
    assert limits.grant("two", []) == (Share("b", ("2",)), Share("a", ("0",)))
    assert limits.grant("more", []) is None
    assert limits.grant("none", []) == ()


@given(
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 8)), min_size=1, max_size=3),
    needs=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 2)), min_size=1, max_size=3
    ),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=20),
)
def test_no_device_is_given_twice(sizes, needs, steps):
    gpus = {f"n{n}": tuple(f"n{n}:{i}" for i in range(count)) for n, (count, _) in enumerate(sizes)}
    nodes = tuple(node_of(f"n{n}", count, cpus) for n, (count, cpus) in enumerate(sizes))
    kinds = {f"k{n}": need_of(count, cpus, 0, on) for n, (count, cpus, on) in enumerate(needs)}
    limits, taken = Limits({}, 60, nodes=nodes, gpus=gpus, needs=kinds), []
    for starts, which in steps:
        kind = f"k{which % len(kinds)}"
        if starts and (grant := limits.grant(kind, taken)) is not None:
            taken.append((kind, grant))
            assert len({share.node for share in grant}) == kinds[kind].num_nodes
            assert all(len(share.gpus) == kinds[kind].gpus for share in grant)
        elif taken:
            taken.pop(which % len(taken))
        names = [name for _, grant in taken for share in grant for name in share.gpus]
        assert len(names) == len({*names})
        for node in nodes:
            assert sum(kinds[k].cpus for k, grant in taken for s in grant if s.node == node.name) <= node.cpus


# --- which there are ---

LISTED = """\
GPU 0: NVIDIA H200 (UUID: GPU-11111111-aaaa-bbbb-cccc-222222222222)
GPU 1: NVIDIA H200 (UUID: GPU-33333333-aaaa-bbbb-cccc-444444444444)
  MIG 3g.71gb     Device  0: (UUID: MIG-5555)
  MIG 3g.71gb     Device  1: (UUID: MIG-6666)
"""


def here(gpus: object = "auto", names: tuple[str, ...] = ("0", "1"), **environment: str) -> Devices:
    return devices_of(LocalConfig(gpus=gpus), environment, lambda: bool(names), lambda: names)


def test_gpus_are_those_that_this_process_may_use():
    assert here().names == ("0", "1")
    assert here(CUDA_VISIBLE_DEVICES="3, GPU-11,MIG-5555").names == ("3", "GPU-11", "MIG-5555")
    assert here(CUDA_VISIBLE_DEVICES="1,-1,0").names == ("1",)
    assert here(HIP_VISIBLE_DEVICES="1").names == ("1",)
    assert here(1).names == ("0",)
    assert here(("GPU-11",)).names == ("GPU-11",)
    assert here(("1",), CUDA_VISIBLE_DEVICES="0,1").names == ("1",)


def test_without_gpus_nothing_is_given_and_nothing_changes():
    for found in (here(names=()), here(CUDA_VISIBLE_DEVICES=""), here("shared")):
        assert found.names == ()
        assert found.variables(()) == {}
    assert here(0).variables(()) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("gpus", "visible", "said"),
    [
        (3, None, r"scheduler.gpus=3: there are 2 here \(all of this machine\); give at most that"),
        (2, "5", r"scheduler.gpus=2: there are 1 here \(CUDA_VISIBLE_DEVICES=5\)"),
        ([0, 1], "1,2", "scheduler.gpus=0,1: CUDA_VISIBLE_DEVICES=1,2 lacks 0"),
        ([0, 0], None, "scheduler.gpus=0,0: names a GPU twice"),
    ],
)
def test_gpus_that_are_not_there_are_refused(gpus, visible, said):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    given = LocalConfig(gpus=tuple(map(str, gpus)) if isinstance(gpus, list) else gpus)
    with pytest.raises(ConfigError, match=said):
        devices_of(given, environment, lambda: True, lambda: ("0", "1"))


@pytest.mark.parametrize("gpus", ["none", "-1", "[0,x]", "[]"])
def test_what_names_no_gpus_is_told_in_one_line(inputs, tmp_path, gpus):
    with pytest.raises(ConfigError) as told:
        composed_of(inputs, tmp_path / "run", f"scheduler.gpus={gpus}")
    assert str(told.value).startswith(
        "scheduler.gpus: write auto, shared, a number of GPUs, or names such as"
    )


@pytest.mark.parametrize("gpus", ["auto", 4, tuple("0123")])
def test_a_run_of_a_sweep_uses_its_part_of_the_gpus_that_the_sweep_asked_for(gpus):
    names = tuple("0123") if gpus == "auto" else tuple("01234567")
    shares = [here(gpus, names, SLURM_PPO_GPUS=",".join(part)) for part in parts(here(gpus, names), 2)]
    assert [share.names for share in shares] == [("0", "1"), ("2", "3")]


def test_runs_of_a_sweep_side_by_side_have_gpus_of_their_own():
    assert parts(here(names=tuple("01234")), 2) == [("0", "1", "2"), ("3", "4")]
    assert parts(here(names=()), 2) == parts(here("shared"), 2) == []
    assert here(SLURM_PPO_GPUS="1").names == ("1",)
    assert here(("7", "8"), SLURM_PPO_GPUS="8").names == ("8",)
    with pytest.raises(ConfigError, match="--at-once=3: each run needs a GPU of its own, and there are 2"):
        parts(here(), 3)


def test_parts_of_a_divided_gpu_are_named_by_their_ids():
    whole = "GPU-11111111-aaaa-bbbb-cccc-222222222222"
    assert parse_list(LISTED) == (whole, "MIG-5555", "MIG-6666")
    assert parse_list(LISTED.partition("  MIG")[0]) == ("0", "1")
    assert parse_list("No devices were found\n") == ()


def test_without_nvidia_smi_device_files_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert listed_gpus(tmp_path, tmp_path) == ("0", "1")
    (tmp_path / "0").mkdir()
    (tmp_path / "0/gpu_id").write_text("4711\n")
    (tmp_path / "1").mkdir()
    (tmp_path / "1/gpu_id").write_text("0\n")  # a CPU
    assert listed_gpus(tmp_path / "nothing", tmp_path) == ("0",)
    (tmp_path / "2/gpu_id").mkdir(parents=True)  # reading fails, as of a GPU that a job was not given
    assert listed_gpus(tmp_path / "nothing", tmp_path) == ("0",)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'GPU 0: H100 (UUID: GPU-1)'; echo 'GPU 1: H100 (UUID: GPU-2)'", ("0", "1")),
        ("echo 'GPU 0: H100 (UUID: GPU-1)'; exit 9", ("0",)),
        ("exec sleep 60", ("0",)),
    ],
)
def test_nvidia_smi_that_fails_or_hangs_is_done_without(tmp_path, monkeypatch, script, found):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("pipeline.executors.devices._LIST_SECONDS", 0.2 if "sleep" in script else 60.0)
    (tmp_path / "nvidia0").touch()
    assert listed_gpus(tmp_path, tmp_path) == found


# --- what tasks need ---


@pytest.fixture
def configured(inputs, tmp_path):
    def make(*more: str):
        words = tiny.overrides(inputs, tmp_path / "run", "scheduler.gpus=[0,1,2,3]", *more)
        return resolve(compose(words))

    return make


def test_a_task_needs_a_gpu_if_it_computes_with_a_model(configured):
    assert gpus_of_tasks(configured(), 4) == {
        "prepare": 0,
        "rollout": 1,
        "reward": 1,
        "update": 1,
        "evaluate": 1,
        "benchmark": 0,
    }
    measured = configured("evaluate.command=[sh,'{policy}','{output}']", "evaluate.command_every=1")
    assert gpus_of_tasks(measured, 4)["benchmark"] == 1
    assert set(gpus_of_tasks(configured(), 0).values()) == {0}
    assert gpus_of_tasks(configured("scheduler.update.ranks=3"), 4)["update"] == 3
    assert gpus_of_tasks(configured("rollout.device_map=auto"), 4)["rollout"] == 4
    split = configured("rollout.engine=vllm", "rollout.vllm.tensor_parallel_size=2")
    needs = gpus_of_tasks(split, 4)
    assert (needs["rollout"], needs["evaluate"], needs["reward"]) == (2, 2, 1)
    pools = configured("reward.components.rm.pool=big", "scheduler.pools.big.gpus=2")
    needs = gpus_of_tasks(pools, 4)
    assert (needs["score-big"], needs["reward"]) == (2, 0)


def test_how_many_run_side_by_side_follows_from_the_gpus(configured):
    limits = local_limits(configured("scheduler.rollout.gpus=2"))
    assert limits.slots == 6
    assert (limits.workers["rollout"], limits.workers["reward"], limits.workers["update"]) == (2, 4, 1)
    assert set(limits.linger.values()) == {0}, "all slots together need more than there are"
    fixed = local_limits(
        configured(
            "scheduler.rollout.slots=2",
            "scheduler.reward.slots=1",
            "scheduler.update.linger=7",
            "scheduler.evaluate.linger=0",
        )
    )
    assert fixed.linger["rollout"] == fixed.linger["reward"] == ALWAYS, "each stage has its own GPUs"
    assert fixed.linger["update"] == 7


def test_a_machine_without_gpus_does_what_it_did(configured, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("pipeline.executors.local_limits.devices_of", lambda given: Devices())
    limits = local_limits(configured("scheduler.gpus=auto"))
    assert limits.slots == 2
    assert limits.workers == {
        **{"prepare": 1, "rollout": 2, "reward": 2, "update": 1, "evaluate": 1, "benchmark": 1}
    }
    assert limits.show(()) == {}


# --- whole runs ---


def test_each_rollout_sees_its_own_gpu_and_an_update_of_two_ranks_both(
    inputs, complete_run, slurm_ppo, environment, tmp_path
):
    heldout = [f"data.heldout={inputs / 'heldout.jsonl'}", "evaluate.every=1"]
    gpus = ["scheduler.gpus=[0,1]", "scheduler.update.ranks=2"]
    words = tiny.overrides(inputs, tmp_path / "run", *heldout, *noting.WORDS, *gpus)
    notes = tmp_path / "notes"
    done = slurm_ppo("run", *words, env=environment | {noting.FILE: str(notes)})
    assert done.returncode == 0, done.stderr
    for stage in ("rollout", "reward"):
        assert {one["sees"] for one in noting.read(notes, stage)} == {"0", "1"}
    updates = {(one["sees"], one["rank"]) for one in noting.read(notes, "update")}
    assert updates == {("0,1", "0"), ("0,1", "1")}
    assert_same_end(tmp_path / "run", complete_run)


@pytest.mark.parametrize("command", ["validate", "run"])
def test_a_task_that_asks_for_more_gpus_than_there_are_is_refused(inputs, slurm_ppo, tmp_path, command):
    for word, said in (
        ("scheduler.update.ranks=3", "scheduler.update.ranks=3: a task needs 3 GPUs, and there are 2"),
        ("scheduler.rollout.gpus=3", "scheduler.rollout.gpus=3: a task needs 3 GPUs, and there are 2"),
    ):
        trainer = "update.engine=tests.support.light:make_trainer_of_ranks"
        words = tiny.overrides(inputs, tmp_path / "run", "scheduler.gpus=[0,1]", trainer, word)
        done = slurm_ppo(command, *words)
        assert done.returncode == 2, done.stderr
        told = done.stderr.strip().splitlines()[-1]
        assert said in told
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "run").exists()
