"""One process does task after task: the same bytes as processes of their own, and no more memory."""

import importlib
import sys

import pytest

from pipeline.run.failures import FailureKind
from stages.attempts.runner import AttemptEnd
from stages.process import imported
from stages.process.imported import imported_files, is_changed
from stages.workers.loop import is_spoilt
from tests.support import processes
from tests.support.tables import LONG
from tests.support.used import done_by_one


@LONG
def test_two_hundred_iterations_in_one_worker_take_no_more_memory(inputs, tmp_path):
    few = (
        "iterations=200",
        "rollout.num_shards=1",
        "data.prompts_per_iteration=2",
        "rollout.max_new_tokens=2",
    )
    run = processes.make_run(inputs, tmp_path / "run", *few)
    tasks = [f"{task.stage} {task.iteration}" for k in range(1, 201) for task in run.plan.tasks(k)]
    said = done_by_one(run.paths.root, ["prepare 0", *tasks])["bytes"]
    sizes = [size for size, task in zip(said[1:], tasks, strict=True) if task.startswith("update")]
    assert len(sizes) == 200
    assert max(sizes) <= 1.05 * sizes[4]


@pytest.mark.parametrize(
    ("failure", "ranks", "spoilt"),
    [
        (None, 1, False),
        (None, 4, False),
        (FailureKind.INPUTS, 1, False),
        (FailureKind.MEMORY, 1, True),
        (FailureKind.DISK, 1, True),
        (FailureKind.INPUTS, 2, True),
    ],
)
def test_after_which_failures_a_process_is_not_used_again(failure, ranks, spoilt):
    assert is_spoilt(AttemptEnd(int(failure is not None), failure), ranks) is spoilt


def test_code_of_the_user_that_has_changed_is_seen(tmp_path, monkeypatch):
    own = tmp_path / "own_rule_of_test_worker.py"
    own.write_text("def score(): return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = frozenset(sys.modules)
    importlib.import_module("own_rule_of_test_worker")
    files = imported_files(but=before)
    assert list(files) == [str(own)]
    assert not is_changed(files)
    own.write_text("def score(): return 10\n")
    assert is_changed(files)
    own.unlink()
    assert is_changed(files)


def test_a_forked_worker_sees_changes_of_what_it_has_imported_itself_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(imported, "_newest", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [f"{which}_rule_of_test_worker" for which in ("inherited", "early", "late")]
    files = [tmp_path / f"{name}.py" for name in names]
    for file in files:
        file.write_text("def score(): return 1\n")
    importlib.import_module(names[0])
    imported.note_inherited()
    own = imported.OwnCode()
    for name in names[1:]:
        importlib.import_module(name)
        own.note()
    files[0].write_text("def score(): return 10\n")
    assert not own.has_changed(), "a new process would be forked from what has the old code, too"
    files[1].write_text("def score(): return 10\n")
    assert own.has_changed()
