"""States that are committed apart from their policy: what one rank meets, all learn of."""

import errno
from types import SimpleNamespace

import pytest

from pipeline.run.directory import Run, load_run
from pipeline.run.tasks import Stage, Task
from stages import ranks
from stages.context import Context
from stages.ppo import saving


@pytest.fixture
def run(complete_run) -> Run:
    return load_run(complete_run)


def test_ranks_learn_of_a_disk_that_one_cannot_use_before_they_write_together(run, monkeypatch, caplog):
    """Otherwise it would answer the others' next question with its answer to another."""
    told = []

    def share(value):
        told.append(value)
        return [value]

    def away(paths, task):
        raise OSError(errno.EIO, "Input/output error", str(paths.root))

    written = []
    writer = SimpleNamespace(write=lambda is_wanted: written.append(is_wanted) or [])
    monkeypatch.setattr(ranks, "share", share)
    monkeypatch.setattr(saving, "LearnerState", lambda context, learner: writer)
    context = Context(run.paths, run.config, Task(2, Stage.UPDATE), "1-aa")
    assert not saving.save_state(context, None, 2)
    assert written == [True]
    assert told == [None, False]

    told.clear()
    monkeypatch.setattr(saving, "opened_history", away)
    assert not saving.save_state(context, None, 2)
    assert written == [True], "nobody writes"
    assert "Input/output error" in told[0]
    assert told[1:] == [False]
    assert "the trainer's state of iteration 2 was not saved" in caplog.text
