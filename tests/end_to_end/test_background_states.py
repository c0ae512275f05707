"""A run whose states are written while the next updates compute: what is lost of them changes no byte."""

import signal
from pathlib import Path

import pytest

from pipeline.run.commits import read_record
from pipeline.run.directory import load_run
from pipeline.run.plan import policy_maker, state_of
from tests.end_to_end.test_staleness import assert_made_of_each_other, assert_same_end, words
from tests.support import light, light_training
from tests.support.killing import events, hooked
from tests.support.tables import sample

SLOWLY = {light_training.STATE_SECONDS: "0.6", light.SECONDS: "0.02"}
"""A state takes longer than an update."""
ITERATIONS = range(1, 7)


@pytest.fixture(scope="module")
def whole(inputs, slurm_ppo, environment, tmp_path_factory):
    """Return an undisturbed run of a staleness with slow states; not to be changed."""
    found: dict[int, Path] = {}

    def get(staleness: int) -> Path:
        if staleness not in found:
            found[staleness] = tmp_path_factory.mktemp("whole") / "run"
            done = slurm_ppo("run", *words(inputs, found[staleness], staleness), env=environment | SLOWLY)
            assert done.returncode == 0, done.stderr
        return found[staleness]

    return get


def times(run_dir: Path):
    """Records of states and of updates, by iteration."""
    paths = load_run(run_dir).paths
    states = {i: read_record(paths, state_of(i)) for i in ITERATIONS}
    return states, {i: read_record(paths, policy_maker(i)) for i in ITERATIONS}


@pytest.mark.parametrize("staleness", sample([0, 1, 2], 1 / 3))
def test_updates_go_on_while_states_are_written_one_at_a_time(whole, staleness):
    states, updates = times(whole(staleness))
    assert all(states.values()), "all are there at the end"
    overlapping = [i for i in range(1, 6) if states[i].ended > updates[i + 1].started]
    assert overlapping, "no update computed while a state was written"
    assert all(states[i].ended <= states[i + 1].started for i in range(1, 6))
    links = [path.name for path in (whole(staleness) / "state").iterdir() if path.is_symlink()]
    assert {"00005", "00006"} <= set(links)


KILLS = [
    (staleness, point)
    for staleness in (0, 1, 2)
    for point in (
        "after-link:iterations/00003/update/shard-00000.json",
        "before-fsync:policy/00004.",
        "before-fsync:state/00002.",
        "before-link:iterations/00002/state/shard-00000.json",
        "after-link:iterations/00002/state/shard-00000.json",
        "driver:30",
    )
]


@pytest.mark.parametrize(("staleness", "point"), sample(KILLS, 1 / 9))
def test_killed_with_a_state_half_written_the_run_ends_in_the_same_bytes(
    staleness, point, whole, inputs, slurm_ppo, environment, tmp_path
):
    run_dir = tmp_path / "run"
    hooks = hooked(environment | SLOWLY, tmp_path, point)
    done = slurm_ppo("run", *words(inputs, run_dir, staleness), env=hooks)
    assert list(tmp_path.glob("killed-*")), "the hook never fired"
    if point.startswith("driver"):
        assert done.returncode == -signal.SIGKILL, done.stderr
        done = slurm_ppo("resume", run_dir, env=environment | SLOWLY)
    assert done.returncode == 0, done.stderr
    assert_same_end(run_dir, whole(staleness), may_lose_state="driver" in point)
    assert_made_of_each_other(run_dir)
    states, _ = times(run_dir)
    said = {event["iteration"] for event in events(run_dir, "state_lost")}
    assert {i for i, state in states.items() if state is None} == said, "each that is lost is said"
    for left in (run_dir / "state").iterdir():
        assert states[int(left.name[:5])] is not None, "what was written in vain is removed"


@pytest.mark.parametrize("staleness", sample([0, 1, 2], 1 / 3))
def test_a_state_that_the_disk_does_not_take_is_said_and_the_next_is_written_before_its_attempt_ends(
    staleness, whole, inputs, slurm_ppo, environment, tmp_path
):
    run_dir = tmp_path / "run"
    full = environment | SLOWLY | {light_training.STATE_FAILS: "2"}
    done = slurm_ppo("run", *words(inputs, run_dir, staleness), env=full)
    assert done.returncode == 0, done.stderr
    assert_same_end(run_dir, whole(staleness))
    states, updates = times(run_dir)
    assert [i for i, state in states.items() if state is None] == [2]
    assert [event["iteration"] for event in events(run_dir, "state_lost")] == [2]
    logs = "".join(path.read_text() for path in (run_dir / "logs").rglob("*.log"))
    assert "iteration 2: the trainer's state was not saved" in logs
    assert "No space left on device" in logs
    behind = [i for i in range(1, 6) if states[i] and states[i].ended > updates[i + 1].started]
    assert behind, "the thread is not used again"
