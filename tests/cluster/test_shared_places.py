"""Stages of a run, and runs of one user, that share a place or two: who waits makes room for who has work.

Workers may stay for five minutes here. None does while a job of the same user could start in its place.
"""

from pathlib import Path

import pytest

from pipeline.run.paths import RunPaths
from pipeline.workers.beats import Doing, Reason
from pipeline.workers.reading import read_beats
from tests.cluster.scenario import STAGES, SlurmRun, policy_of, staying
from tests.support.tables import IS_SOAK, sample

TRIAL = pytest.mark.trial(1 / 2)
MADE_ROOM = {Reason.NEEDED, Reason.DONE, Reason.WARNED, Reason.ONE}
"""Why workers of these runs leave: never since a time was over, or since something is far."""


def sharing(gpus: int) -> list[str]:
    """Words that put all stages on the two GPUs of one node, each job on so many of them."""
    stages = (*STAGES, "evaluate")
    places = [(f"scheduler.{s}.partition=rollout", f"scheduler.{s}.gpus_per_node={gpus}") for s in stages]
    return [word for words in places for word in words]


def assert_whoever_waited_made_room(run: SlurmRun, expected: Path) -> None:
    left = read_beats(RunPaths(run.root)).values()
    assert {beat.doing for beat in left} == {Doing.LEAVING}, run.story()
    assert {beat.reason for beat in left} <= MADE_ROOM, [*left, run.story()]
    assert Reason.NEEDED in {beat.reason for beat in left}, "one at least had to make room"
    assert run.policy() == policy_of(expected), run.story()
    assert not run.events("failed"), run.story()


@TRIAL
@pytest.mark.parametrize("start_early", sample([False, True], 1 / 2), ids="early={}".format)
def test_three_stages_share_one_place(cluster, make_run, complete_run, tmp_path, start_early):
    words = ["iterations=2", *staying(300, start_early), *sharing(gpus=2)]
    run = make_run(cluster, tmp_path / "run", *words)
    run.submit()
    run.wait_until_complete(limit=250)
    assert_whoever_waited_made_room(run, complete_run)


@TRIAL
def test_several_runs_share_two_places(cluster, make_run, complete_run, tmp_path):
    """Six of them, in the suite three."""
    words = ["iterations=2", *staying(300), *sharing(gpus=1)]
    runs = [make_run(cluster, tmp_path / f"run{number}", *words) for number in range(6 if IS_SOAK else 3)]
    for run in runs:
        run.submit()
    for run in runs:
        run.wait_until_complete()
        assert_whoever_waited_made_room(run, complete_run)
