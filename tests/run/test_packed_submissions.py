"""What was submitted to Slurm for an old iteration is packed with it: read as before, and no number twice."""

import json

import pytest

from pipeline.config.update import UpdateConfig
from pipeline.executors.slurm.arrays import stage_submissions
from pipeline.orchestrate.rewind import go_back, parse_point
from pipeline.run.commits import publish
from pipeline.run.directory import Run
from pipeline.run.endings import element_ending, note_endings, read_endings
from pipeline.run.packed import archives
from pipeline.run.packing import pack_old
from pipeline.run.plan import policy_maker
from pipeline.run.submissions import Ledger, State, Submission
from pipeline.run.tasks import PREPARE, Stage, Task
from tests.support import reportrun
from tests.support.inodes import by_kind

NEWEST = 4


@pytest.fixture
def run(tmp_path) -> Run:
    """Four iterations that are done, submitted once each; an attempt of each failed."""
    update = UpdateConfig(keep_shards_last=2)
    made = reportrun.make_run(tmp_path / "run", 1, iterations=5, scheduler=reportrun.SLURM, update=update)
    publish(made.paths, reportrun.record(PREPARE))
    for iteration in range(1, NEWEST + 1):
        reportrun.commit_shard(made, iteration, 0, responses=["a"], rewards=[0.0])
        publish(made.paths, reportrun.record(policy_maker(iteration)))
        noted = submit(made, iteration)
        note_endings(made.paths, [element_ending(made.paths, noted, 0)])
    rows = "".join(json.dumps({"iteration": i}) + "\n" for i in range(1, NEWEST + 1))
    made.paths.metrics.write_text(rows)
    return made


def submit(run: Run, iteration: int) -> Submission:
    ledger, task = Ledger(run.paths), Task(iteration, Stage.ROLLOUT)
    number = ledger.next_number(iteration, task.job_kind)
    (made,) = stage_submissions(run, 1, number, [task], 1000)
    assert ledger.begin(made)
    ledger.script(made).write_text("#!/bin/bash\n")
    log = made.log(run.paths, task)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("it starts\n")
    return ledger.note(made, State(f"{100 * iteration + number}"))


def test_packed_submissions_and_endings_are_read_as_before(run):
    ledger, iterations = Ledger(run.paths), range(1, NEWEST + 1)
    before, ended = ledger.load(iterations), read_endings(run.paths, iterations)
    assert list(pack_old(run, NEWEST)) == []
    assert archives(run.paths, 1)[1].exists()
    assert not run.paths.submissions(1).exists()
    assert "slurm" not in by_kind(run.paths.root, 1)
    assert ledger.load(iterations) == before
    assert ledger.named([before[0].name]) == before[:1]
    assert read_endings(run.paths, iterations) == ended
    assert ledger.next_number(1, "rollout") == 2


def test_what_is_found_out_late_about_a_packed_submission_is_noted(run):
    assert list(pack_old(run, NEWEST)) == []
    ledger = Ledger(run.paths)
    (packed,) = ledger.load([1])
    noted = ledger.note(packed, State("9", is_withdrawn=True))
    assert ledger.load([1]) == [noted] != [packed]


def test_what_a_job_in_the_queue_still_reads_stays(run):
    ledger = Ledger(run.paths)
    (waiting,) = ledger.load([1])
    in_use = set(ledger.files(waiting, [0]))
    assert list(pack_old(run, NEWEST, lambda: in_use)) == []
    assert {path for path in in_use if (run.paths.root / path).exists()} == in_use
    assert len(in_use) == 4
    noted = ledger.note(waiting, State("101", withdrawn=(0,)))
    assert ledger.load([1]) == [noted]


@pytest.mark.parametrize("point", ["rollout@2", "reward@2", "rollout@1"])
def test_after_going_back_no_number_is_given_twice(run, point):
    assert list(pack_old(run, NEWEST)) == []
    folder = go_back(run, parse_point(point))
    for iteration in (1, 2):
        assert submit(run, iteration).number == 2, "or its job would have the name of an old one"
    taken_back = {1, 2} if point == "rollout@1" else {2} if point == "rollout@2" else set()
    assert {e.task for e in read_endings(run.paths, (1, 2)).values()} == {
        f"{iteration}/rollout/0" for iteration in {1, 2} - taken_back
    }
    assert {int(path.parent.name) for path in folder.glob("slurm/*/endings.json")} >= taken_back
