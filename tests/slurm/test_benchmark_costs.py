"""What benchmarks on Slurm count: calls of its commands, and places that change hands."""

import subprocess
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import slurm_costs
from benchmarks.slurm_costs import Kind, hand_overs, kind_of
from benchmarks.slurm_runs import layout_of
from slurm.devcluster import Layout
from tests.support.beats import beat
from tests.support.counting import Call, most_in_a_minute, put_in_front


def test_a_wrapper_notes_each_call_and_carries_it_out(tmp_path):
    real = tmp_path / "real/squeue"
    real.parent.mkdir()
    real.write_text("#!/bin/sh\necho said $#; exit 3\n")
    real.chmod(0o755)
    counting = put_in_front(tmp_path / "wrappers", str(real.parent))
    environment = counting.environment({"PATH": f"{real.parent}:/usr/bin:/bin"})
    done = subprocess.run(["squeue", "-h", "--me", "x y"], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("said 3\n", 3)
    (call,) = counting.calls()
    assert (call.program, call.words) == ("squeue", ("-h", "--me"))
    assert 0 <= time.time() - call.time < 60


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("squeue --me", Kind.QUERY),
        ("scontrol show job 4", Kind.QUERY),
        ("scontrol update JobId=4 Dependency=", Kind.OTHER),
        ("scancel -v --batch", Kind.SIGNAL),
        ("scancel 4", Kind.CANCELLATION),
        ("sbatch --parsable", Kind.SUBMISSION),
    ],
)
def test_kinds_of_calls(command, kind):
    program, *words = command.split()
    assert kind_of(Call(0.0, program, tuple(words))) is kind


@given(st.lists(st.integers(0, 600), max_size=40).map(sorted))
def test_the_worst_minute_is_that_of_some_call(times):
    counts = [sum(first <= time < first + 60 for time in times) for first in times]
    calls = [Call(time, program, ()) for time in times for program in ("squeue", "sbatch")]
    assert most_in_a_minute(calls)[0] == max(counts, default=0)


def test_stages_that_take_turns_in_one_place_hand_it_over_with_each_start_but_the_first():
    lives = [(0.0, 10.0), (11.0, 15.0), (16.0, 18.0), (19.0, 30.0)]
    assert hand_overs(lives) == [11.0, 16.0, 19.0]


def test_two_places_that_are_filled_at_once_are_no_hand_over():
    assert hand_overs([(0.0, 50.0), (1.0, 20.0)]) == []
    assert hand_overs([(0.0, 50.0), (1.0, 20.0), (20.0, 50.0)]) == [20.0], "who ends when another begins"
    assert hand_overs([]) == []


def test_gpu_seconds_are_those_of_each_kind_times_its_gpus():
    one = beat("1_0r0", busy_seconds=5.0, since=1000.0)
    two = beat("1_1r0", "update", busy_seconds=2.0, since=1000.0)
    spent = slurm_costs.gpu_seconds([one, two], {"rollout": 1, "update": 4}.__getitem__)
    assert (spent.startup, spent.busy) == (10.0 + 40.0, 5.0 + 8.0)


def test_two_places_are_what_is_shipped():
    assert layout_of(2) == Layout()
    gpus = {node.name: node.gpus for node in layout_of(4).nodes}
    assert gpus == {"rollout0": 4, "reward0": 4, "update0": 2, "update1": 2}
