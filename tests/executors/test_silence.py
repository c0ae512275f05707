"""Silent workers are looked at twice, by whoever makes passes, with clocks that may differ."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.executors.slurm.silence import (
    LOOK_AGAIN_SECONDS,
    SILENT_SECONDS,
    Silence,
    as_cancelled,
    look_again,
    note_silences,
    read_silences,
)
from pipeline.run.paths import RunPaths
from tests.support.damage import flip_bit

SOON, LATE = LOOK_AGAIN_SECONDS - 1, LOOK_AGAIN_SECONDS + 1


def test_the_second_look_ends_a_worker_that_has_said_nothing_since_the_first():
    ended, noted = look_again({"7_0": 100.0}, {}, "n1", 500.0)
    assert (ended, noted) == ([], {"7_0": Silence(100.0, {"n1": 500.0})})
    assert look_again({"7_0": 100.0}, noted, "n1", 500.0 + SOON)[0] == []
    assert look_again({"7_0": 100.0}, noted, "n1", 500.0 + LATE)[0] == ["7_0"]
    ended, renewed = look_again({"7_0": 120.0}, noted, "n1", 500.0 + LATE)
    assert ended == [], "it has beaten in between"
    assert look_again({}, renewed, "n1", 600.0) == ([], {}), "it is heard of again"


def test_a_look_from_another_machine_counts_once_no_clock_can_be_that_far_ahead():
    _, noted = look_again({"7_0": 100.0}, {}, "n1", 500.0)
    ended, noted = look_again({"7_0": 100.0}, noted, "n2", 500.0 + LATE)
    assert ended == [], "this clock may be ahead of the first by so much"
    assert look_again({"7_0": 100.0}, noted, "n2", 500.0 + 2 * LATE)[0] == ["7_0"]
    assert look_again({"7_0": 100.0}, noted, "n3", 500.0 + LATE + SILENT_SECONDS)[0] == ["7_0"]


def test_a_clock_that_was_set_back_begins_again():
    _, noted = look_again({"7_0": 100.0}, {}, "n1", 5000.0)
    ended, noted = look_again({"7_0": 100.0}, noted, "n1", 500.0)
    assert ended == []
    assert look_again({"7_0": 100.0}, noted, "n1", 500.0 + LATE)[0] == ["7_0"]


@given(
    st.floats(-250.0, 250.0),
    st.lists(st.tuples(st.sampled_from(["n1", "n2"]), st.floats(0.0, 60.0)), max_size=12),
)
def test_nobody_is_ended_before_the_time_is_up_however_far_clocks_are_apart(ahead, looks):
    """Of two machines that look in turn, one has a clock that is ahead of the other's."""
    noted, passed = {}, 0.0
    for host, pause in looks:
        passed += pause
        now = 1000.0 + passed + (ahead if host == "n2" else 0.0)
        ended, noted = look_again({"7_0": 100.0}, noted, host, now)
        assert not ended or passed - looks[0][1] >= LOOK_AGAIN_SECONDS


@given(st.lists(st.sampled_from(["n1", "n2", "n3"]), min_size=60, max_size=60))
def test_a_worker_that_stays_silent_is_ended_whoever_looks(hosts):
    noted, ended = {}, []
    for minute, host in enumerate(hosts):
        found, noted = look_again({"7_0": 100.0}, noted, host, 1000.0 + 60 * minute)
        ended += found
    assert ended


def test_for_what_a_worker_was_cancelled_is_kept_until_that_is_judged():
    """Also while others fall silent, and Slurm still ends it."""
    _, noted = look_again({"7_0": 100.0}, {}, "n1", 500.0)
    noted = as_cancelled(noted, ["7_0"])
    _, later = look_again({"7_1": 150.0}, noted, "n1", 600.0)
    assert later["7_0"].is_cancelled
    assert not later["7_1"].is_cancelled
    assert "7_0" not in look_again({"7_1": 150.0}, later, "n1", 500.0 + 3600)[1]


def test_what_passes_note_is_read_back_and_a_spoilt_file_is_as_if_nobody_had_looked(tmp_path):
    paths = RunPaths(tmp_path)
    paths.slurm.mkdir()
    assert read_silences(paths) == {}
    noted = {"7_0": Silence(100.0, {"n1": 500.0}), "7_11": Silence(1.5, {"n1": 500.0, "n2": 501.25})}
    note_silences(paths, noted)
    assert read_silences(paths) == noted
    flip_bit(paths.slurm / "silent.json")
    assert read_silences(paths) == {}
