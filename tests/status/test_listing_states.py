"""A list of runs says what status says, of odd folders too, and by which number policies are the best."""

import json
from pathlib import Path

import pytest

from pipeline.config.evaluate import EvaluateConfig
from pipeline.run import journal
from pipeline.run.benchmarks import leave_out
from pipeline.run.directory import Run
from pipeline.run.failures import Failure, FailureKind
from pipeline.run.tasks import Stage, Task
from pipeline.status.listing import Entry, find_places, read_entries
from pipeline.status.listing_text import describe
from tests.support.reportrun import make_row, make_run
from tests.support.sweeps import make_sweep

MEASURED = EvaluateConfig(command=("measure", "{policy}", "{output}"), command_every=10)


def entries(folder: Path) -> list[Entry]:
    return read_entries(find_places(folder), set)


def trained(root: Path, **more: object) -> Run:
    run = make_run(root, **more)
    journal.rewrite(run.paths.metrics, [make_row(i) for i in range(1, 21)])
    return run


def leave_policy_out(run: Run, iteration: int) -> None:
    """As the driver does where the program has failed too often: a commit without numbers."""
    failure = Failure(Task(iteration, Stage.BENCHMARK), 1, FailureKind.CONFIG, "no numbers", "log")
    leave_out(run.paths, failure, [], {})


def test_a_run_is_complete_when_the_last_policy_was_measured_or_left_out(tmp_path):
    run = trained(tmp_path / "run", evaluate=MEASURED)
    for iteration in (0, 10):
        leave_policy_out(run, iteration)
    assert [entry.state for entry in entries(tmp_path)] == ["incomplete"]
    leave_policy_out(run, 20)
    assert [entry.state for entry in entries(tmp_path)] == ["complete"]


def test_a_link_to_itself_is_no_run_and_hides_none(tmp_path):
    trained(tmp_path / "run")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    assert [Path(entry.run).name for entry in entries(tmp_path)] == ["run"]


def test_of_a_manifest_in_which_a_letter_has_flipped_the_runs_that_are_there_are_listed(tmp_path):
    make_sweep(tmp_path / "lr", ["1e-6"], 2)
    manifest = tmp_path / "lr/sweep.json"
    manifest.write_text(manifest.read_text().replace('-seed_1"', '-seed_3"', 1))
    found = [(Path(entry.run).name, entry.state) for entry in entries(tmp_path)]
    assert found == [("learning_rate_1e-6-seed_0", "complete"), ("learning_rate_1e-6-seed_1", "incomplete")]


@pytest.mark.parametrize(
    ("metrics", "title"),
    [
        ([None, None], "held-out"),
        (["eval/loss", "eval/loss"], "eval/loss"),
        ([None, "eval/loss"], "best"),
    ],
)
def test_the_column_of_best_values_says_what_they_are_of(tmp_path, metrics, title):
    for number, metric in enumerate(metrics):
        best = {"iteration": 9, "reward": 0.5, "policy": "policy/00009.1-a"}
        best |= {"metric": metric} if metric else {}
        trained(tmp_path / f"run{number}").paths.best.write_text(json.dumps(best))
    found = entries(tmp_path)
    assert [(entry.best, entry.best_metric) for entry in found] == [(0.5, metric) for metric in metrics]
    titles = describe(found, tmp_path).splitlines()[0].split()
    assert titles[titles.index("reward") + 1] == title
