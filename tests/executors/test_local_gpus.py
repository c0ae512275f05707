"""The GPUs of one machine: who gets which, who makes place, and what is refused. They are only pretended."""

import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.compose import compose
from pipeline.config.issue import ConfigError
from pipeline.config.resolve import resolve
from pipeline.config.scheduler import LocalConfig
from pipeline.executors.assignment import (
    Decision,
    Grant,
    Holder,
    Need,
    Room,
    Share,
    Waiting,
    assign,
    place,
    who_makes_place,
)
from pipeline.executors.devices import Devices, devices_of, listed_gpus, parse_list, parts
from pipeline.executors.local_limits import gpus_of_tasks, local_limits
from pipeline.executors.processes import LocalExecutor
from pipeline.executors.running import Job, LocalLimits
from tests.support import noting, tiny
from tests.support.killing import assert_same_end

POOLS = ("rollout", "reward", "update", "rules")


# --- the rule ---


class World:
    """Jobs of pools, what they hold, and the rule that says what happens next."""

    def __init__(self, nodes: list[Share], needs: dict[str, Need], slots: int, staying: set[str]) -> None:
        self.nodes, self.needs, self.slots, self.staying = nodes, needs, slots, staying
        self.queue: list[str] = []
        self.running: list[tuple[str, Grant]] = []
        self.idle: list[tuple[str, Grant]] = []
        self.leaving: list[Grant] = []

    def step(self) -> Decision:
        waiting = [Waiting(pool, need=self.needs[pool]) for pool in self.queue]
        idle = [Holder(pool, grant=grant) for pool, grant in self.idle]
        held = [share for _, grant in self.running for share in grant]
        coming = [share for grant in self.leaving for share in grant]
        room = Room(self.slots - len(self.running), dict.fromkeys(POOLS, 99))
        decision = assign(waiting, idle, self.nodes, held, coming, room)
        self.check_order(decision)
        started = {**decision.starts, **{n: self.idle[i][1] for n, i in decision.takes.items()}}
        self.running += [(self.queue[n], grant) for n, grant in started.items()]
        self.leaving += [self.idle[i][1] for i in decision.leaves]
        gone = {*decision.takes.values(), *decision.leaves}
        assert len(gone) == len(decision.takes) + len(decision.leaves), "no process is in two places"
        self.idle = [one for n, one in enumerate(self.idle) if n not in gone]
        self.queue = [pool for n, pool in enumerate(self.queue) if n not in started]
        self.check_nothing_is_used_twice()
        return decision

    def check_order(self, decision: Decision) -> None:
        """Where a slot is free, no later job gets devices that an earlier one waits for."""
        started = {*decision.starts, *decision.takes}
        if len(self.running) + len(started) < self.slots:
            wanting = [n for n, pool in enumerate(self.queue) if not self.needs[pool].is_nothing]
            inside = [n in started for n in wanting]
            assert inside == sorted(inside, reverse=True)

    def check_nothing_is_used_twice(self) -> None:
        holders = [grant for _, grant in (*self.running, *self.idle)] + self.leaving
        for node in self.nodes:
            shares = [share for grant in holders for share in grant if share.node == node.node]
            names = [name for share in shares for name in share.gpus]
            assert len(names) == len({*names})
            assert {*names} <= {*node.gpus}
            assert sum(share.cpus for share in shares) <= node.cpus
        for pool, grant in self.running:
            assert len({share.node for share in grant}) == self.needs[pool].nodes
            assert all(len(share.gpus) == self.needs[pool].gpus for share in grant)

    def end(self, which: int) -> None:
        """A job that runs ends, or a process that was told to leave has left."""
        if which < len(self.leaving):
            self.leaving.pop(which)
            return
        pool, grant = self.running.pop(which - len(self.leaving))
        if pool in self.staying:
            self.idle.append((pool, grant))

    @property
    def going(self) -> int:
        return len(self.leaving) + len(self.running)


NODES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 8)), min_size=1, max_size=3).map(
    lambda sizes: [
        Share(f"n{n}", tuple(f"n{n}:{i}" for i in range(gpus)), cpus, math.inf)
        for n, (gpus, cpus) in enumerate(sizes)
    ]
)
NEEDS = st.builds(Need, gpus=st.integers(0, 3), cpus=st.integers(0, 4), nodes=st.integers(1, 2))


@given(
    nodes=NODES,
    needs=st.fixed_dictionaries(dict.fromkeys(POOLS, NEEDS)),
    slots=st.integers(1, 5),
    staying=st.sets(st.sampled_from(POOLS)),
    arrivals=st.lists(st.lists(st.sampled_from(POOLS), max_size=4), max_size=8),
    data=st.data(),
)
def test_no_device_is_used_twice_and_every_job_has_its_turn(nodes, needs, slots, staying, arrivals, data):
    world = World(nodes, needs, slots, staying)
    arrivals = [[pool for pool in jobs if place(needs[pool], nodes)] for jobs in arrivals]
    left = 4 * sum(map(len, arrivals)) + len(arrivals)
    while arrivals or world.queue or world.running:
        world.queue += arrivals.pop(0) if arrivals else []
        world.step()
        assert world.going or not world.queue, "nothing is under way, and jobs wait"
        if world.going:
            world.end(data.draw(st.integers(0, world.going - 1)))
        left -= 1
        assert left >= 0, "it goes round in circles"


def test_an_update_of_two_gpus_is_not_overtaken_for_ever_by_small_jobs():
    world = World([Share("", ("0", "1"))], {"rollout": Need(1), "update": Need(2)}, 9, set())
    world.queue = ["rollout", "rollout"]
    world.step()
    world.queue = ["update", "rollout"]
    world.end(0)
    assert world.step() == Decision(), "the free one is kept for the update"
    world.end(0)
    assert world.step().starts == {0: (Share("", ("0", "1"), 0, 0),)}


def test_those_who_wait_make_place_the_longest_idle_first_and_no_more_than_needed():
    idle = [Holder("rollout", grant=(Share("", (name,), 0, 0),)) for name in "012"]
    decision = assign(
        [Waiting("update", need=Need(2))], idle, [Share("", tuple("0123"))], [], [], Room(2, {"update": 1})
    )
    assert decision == Decision(leaves=(0,))
    leaving = idle[0].grant
    again = assign(
        [Waiting("update", need=Need(2))],
        idle[1:],
        [Share("", tuple("0123"))],
        [],
        leaving,
        Room(2, {"update": 1}),
    )
    assert again == Decision(), "what is about to be free is waited for"


def test_only_those_leave_whose_place_helps():
    holders = {0: (Share("a", ("a0",), 0, 0),), 1: (Share("b", ("b0",), 0, 0),)}
    free = [Share("a", (), 4, 0), Share("b", ("b1",), 4, 0)]
    assert who_makes_place(Need(gpus=2), free, holders) == (1,)
    assert who_makes_place(Need(gpus=3), free, holders) == ()


def test_the_fullest_node_with_room_is_taken():
    nodes = [Share("a", ("0", "1"), 8, 0), Share("b", ("0",), 8, 0)]
    assert place(Need(gpus=1, cpus=2), nodes) == (Share("b", ("0",), 2, 0),)
    assert place(Need(gpus=1, nodes=2), nodes) is not None
    assert place(Need(gpus=2, nodes=2), nodes) is None


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
        assert found.variables((Share(),)) == {}
    assert here(0).variables((Share(),)) == {"CUDA_VISIBLE_DEVICES": ""}


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
        compose(tiny.overrides(inputs, tmp_path / "run", f"scheduler.gpus={gpus}"))
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
    assert (limits.pools["rollout"], limits.pools["reward"], limits.pools["update"]) == (2, 4, 1)
    assert set(limits.linger.values()) == {0}, "all slots together need more than there are"
    fixed = local_limits(
        configured(
            "scheduler.rollout.slots=2",
            "scheduler.reward.slots=1",
            "scheduler.update.linger=7",
            "scheduler.evaluate.linger=0",
        )
    )
    assert fixed.linger["rollout"] == fixed.linger["reward"] == math.inf, "each stage has its own GPUs"
    assert fixed.linger["update"] == 7


def test_a_machine_without_gpus_does_what_it_did(configured, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("pipeline.executors.local_limits.devices_of", lambda given: Devices())
    limits = local_limits(configured("scheduler.gpus=auto"))
    assert limits.slots == 2
    assert limits.pools == {
        **{"prepare": 1, "rollout": 2, "reward": 2, "update": 1, "evaluate": 1, "benchmark": 1}
    }
    assert limits.show((Share(),)) == {}


# --- processes ---


@pytest.fixture
def executor():
    devices = Devices(("0", "1"), True)
    limits = LocalLimits(
        4,
        {"rollout": 4, "update": 1},
        60,
        {"rollout": math.inf},
        nodes=(Share(gpus=devices.names),),
        needs={"rollout": Need(1), "update": Need(2)},
        show=devices.variables,
    )
    made = LocalExecutor("tests.support.scheduled:serve", [], limits)
    yield made
    made.cancel()


def test_those_who_wait_with_a_gpu_give_way_to_an_update_of_two(executor, tmp_path):
    go = tmp_path / "go"

    def job(key: str, pool: str, ranks: int = 1) -> Job:
        what = ("after", str(go), "environment", "CUDA_VISIBLE_DEVICES")
        words = what if ranks == 1 else ("ranks", *["environment CUDA_VISIBLE_DEVICES"] * ranks)
        return Job(key, pool, words, tmp_path / f"{key}.log", ranks=ranks)

    def finish(*keys: str) -> None:
        ended: dict = {}
        until = time.monotonic() + 30
        while ended.keys() < {*keys}:
            assert time.monotonic() < until
            executor.wait(1)
            ended |= executor.collect_ended()
        assert {end.exit_code for end in ended.values()} == {0}

    executor.submit([job(name, "rollout") for name in ("a", "b", "c")])
    executor.wait(0)
    assert sorted(executor._running) == ["a", "b"], "the third has no GPU yet"
    go.touch()
    finish("a", "b", "c")
    assert sorted(seen(tmp_path / f"{name}.log") for name in "ab") == ["0", "1"]
    assert len(executor._idle) == 2
    executor.submit([job("update", "update", ranks=2)])
    finish("update")
    assert executor._idle == []
    assert seen(tmp_path / "update.log") == seen(tmp_path / "update.rank-1.log") == "0,1"


def seen(log: Path) -> str:
    return log.read_text().splitlines()[-1]


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
