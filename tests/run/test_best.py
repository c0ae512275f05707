"""best.json: who reads a spoilt one is told so in a line, and going back leaves none of what it took back."""

import json

import pytest

from pipeline import open_run
from pipeline.config.scheduler import LocalConfig
from pipeline.orchestrate.rewind import go_back, parse_point
from pipeline.report import write_report, write_sweep_report
from pipeline.report.comparison import compare_sweep
from pipeline.run import journal
from pipeline.run.commits import publish
from pipeline.run.directory import Run
from pipeline.run.export import export
from pipeline.run.identity import RunError
from pipeline.run.retention import keep_best, thin
from pipeline.run.tasks import PREPARE
from tests.support import reportrun
from tests.support.committed import commit
from tests.support.sweeps import make_sweep

SPOILT = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b"{}",
    b'{"iteration": "2", "reward": 1, "policy": "policy/00002.1-ab"}',
]


@pytest.fixture
def run(tmp_path) -> Run:
    """Three iterations are done; every later policy is better."""
    run = reportrun.make_run(tmp_path / "run", iterations=9, scheduler=LocalConfig())
    publish(run.paths, reportrun.record(PREPARE))
    for iteration in (1, 2, 3):
        reportrun.commit_shard(run, iteration, 0, responses=["a", "b"], rewards=[1.0, 2.0])
        commit(run, iteration)
        row = {"policy_version": iteration, "evaluate/reward": float(iteration)}
        journal.append(run.paths.metrics, reportrun.make_row(iteration) | row)
    keep_best(run, rows_of(run))
    assert best_of(run) == 3
    return run


def rows_of(run: Run) -> list[journal.Row]:
    return journal.read(run.paths.metrics)


def best_of(run: Run) -> int:
    """The best policy by its number, as file and link say."""
    best = json.loads(run.paths.best.read_text())
    assert (run.paths.policies / "best").resolve() == run.paths.root / best["policy"]
    return int(best["iteration"])


@pytest.mark.parametrize("content", SPOILT)
def test_a_spoilt_one_is_told_in_a_line_with_the_way_out(run, content, tmp_path):
    run.paths.best.write_bytes(content)
    root = run.paths.root
    for call in (
        lambda: write_report(run),
        lambda: export(f"{root}@best", tmp_path / "model", adapter=False, say=print),
        lambda: open_run(root).policies(),
        lambda: list(thin(run, 3)),
    ):
        with pytest.raises(RunError) as told:
            call()
        said = str(told.value)
        assert said.startswith(f"{root}/best.json cannot be read (")
        assert said.endswith(f"; remove it, and slurm-ppo resume {root} writes it again")
        assert "\n" not in said


@pytest.mark.parametrize("content", SPOILT)
def test_the_next_driver_writes_it_again(run, content):
    run.paths.best.write_bytes(content)
    keep_best(run, rows_of(run))
    assert best_of(run) == 3


def test_a_report_of_a_sweep_names_the_run_and_shows_the_others(tmp_path):
    make_sweep(tmp_path / "lr", ["1e-6", "3e-6"], 1)
    (tmp_path / "lr/learning_rate_1e-6-seed_0/best.json").write_text("{")
    assert list(compare_sweep(tmp_path / "lr").unreadable) == ["learning_rate_1e-6-seed_0"]
    assert "best.json cannot be read" in write_sweep_report(tmp_path / "lr").read_text()


@pytest.mark.parametrize("content", [None, *SPOILT])
def test_going_back_moves_it_aside_and_chooses_again(run, content):
    if content is not None:
        run.paths.best.write_bytes(content)
    spoilt = run.paths.best.read_bytes()
    folder = go_back(run, parse_point("update@3"))
    assert best_of(run) == 2
    assert folder is not None
    assert (folder / "best.json").read_bytes() == spoilt


def test_going_back_that_was_killed_half_way_leaves_no_best_policy_of_what_it_moves(run):
    """The rows are trimmed already when it is typed again; none of the rest was evaluated."""
    journal.rewrite(run.paths.metrics, [{"iteration": 1, "policy_version": 1}])
    go_back(run, parse_point("update@2"))
    assert not run.paths.best.exists()
    assert not (run.paths.policies / "best").is_symlink()


def test_a_best_policy_that_stays_is_left_as_it_is(run):
    run.paths.best.write_text(json.dumps({"iteration": 1, "reward": 9.0, "policy": "policy/00001.1-ab"}))
    before = run.paths.best.stat().st_mtime_ns
    go_back(run, parse_point("rollout@2"))
    assert run.paths.best.stat().st_mtime_ns == before
