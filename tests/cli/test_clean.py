"""What clean refuses, and what it says of what it could not do; of runs without models."""

import shutil
import time
from pathlib import Path

import pytest

from pipeline.cli.clean import clean_runs
from pipeline.config.scheduler import LocalConfig
from pipeline.run.control import begin_invocation
from pipeline.run.directory import Run
from pipeline.run.identity import RunError
from pipeline.run.submissions import read_limits_of
from pipeline.workers.beats import Doing
from tests.support import reportrun
from tests.support.beats import beat, write_beats

CONFIG = "ClusterName = {}\nSLURM_VERSION = 24.05.8\nMaxArraySize = 9\nMaxJobCount = 9\nMinJobAge = 300 sec\n"


def left_behind(run: Run) -> Path:
    """What going back has moved aside, of 1000 bytes."""
    file = run.paths.superseded / "20260101-update@1/file"
    file.parent.mkdir(parents=True)
    file.write_text("x" * 1000)
    return file


@pytest.fixture
def cluster(monkeypatch):
    """Slurm's commands, of a cluster whose queue shows no job: its name may be changed."""
    name = ["gold"]

    def run(command, *arguments, **options):
        return CONFIG.format(name[0]) if command[0] == "scontrol" else ""

    for module in ("slurm.query", "slurm.ended", "slurm.limits"):
        monkeypatch.setattr(f"{module}.run_command", run)
    return name


@pytest.fixture
def submitted(tmp_path, cluster) -> Run:
    run = reportrun.make_run(tmp_path / "runs/submitted", scheduler=reportrun.SLURM)
    begin_invocation(run.paths)
    assert read_limits_of(run.paths).name == "gold"
    left_behind(run)
    return run


def test_a_run_of_ones_own_without_jobs_is_cleaned(submitted, capsys):
    assert clean_runs(submitted.paths.root, yes=True, only=[]) == 0
    assert "removed 1000 bytes" in capsys.readouterr().out
    assert not any(submitted.paths.superseded.iterdir())


def refused(run: Run, why: str) -> None:
    with pytest.raises(RunError, match=why):
        clean_runs(run.paths.root, yes=True, only=[])
    assert any(run.paths.superseded.iterdir()), "nothing was removed"


def test_the_run_of_a_colleague_is_refused_however_idle_it_looks(submitted, monkeypatch):
    owner = submitted.paths.control.stat().st_uid
    monkeypatch.setattr("os.getuid", lambda: owner + 4711)
    refused(submitted, "was submitted by .*, whose jobs are not .* to end or replace: ask .* to run this")


def test_on_the_login_node_of_another_cluster_a_run_is_refused(submitted, cluster):
    cluster[0] = "silver"
    refused(submitted, "was submitted to cluster gold, and this machine asks silver")


@pytest.mark.parametrize(
    ("doing", "age", "is_refused"),
    [(Doing.BUSY, 12, True), (Doing.BUSY, 500, False), (Doing.LEAVING, 12, False)],
)
def test_a_run_whose_worker_was_just_heard_of_is_refused(submitted, doing, age, is_refused):
    """A colleague goes on with it."""
    write_beats(submitted.paths, beat("17_3r0", doing=doing, beat=time.time() - age))
    if is_refused:
        refused(submitted, "worker 17_3r0 of .*, on gpu07, sent a heartbeat 1[2-9] s ago; wait for the run")
    else:
        assert clean_runs(submitted.paths.root, yes=True, only=[]) == 0


def test_what_was_removed_is_said_of_what_is_gone(tmp_path, monkeypatch, capsys):
    runs = [reportrun.make_run(tmp_path / f"runs/{name}", scheduler=LocalConfig()) for name in "ab"]
    stays, goes = map(left_behind, runs)
    real = shutil.rmtree

    def rmtree(path, *arguments, **options):
        where = Path(f"/proc/self/fd/{options['dir_fd']}").resolve()
        if where / path == stays.parent:
            raise PermissionError(13, "Permission denied", str(path))
        real(path, *arguments, **options)

    monkeypatch.setattr("pipeline.run.inside.shutil.rmtree", rmtree)
    assert clean_runs(tmp_path / "runs", yes=True, only=[]) == 1
    said = capsys.readouterr()
    assert "removed 1000 bytes; 1000 bytes are left:" in said.out
    assert f"{stays.parent} could not be removed: " in said.err
    assert stays.exists()
    assert not goes.exists()


def test_a_run_that_cannot_be_looked_into_keeps_no_other_from_being_cleaned(tmp_path, capsys):
    runs = [reportrun.make_run(tmp_path / f"runs/{name}", scheduler=LocalConfig()) for name in "ab"]
    files = [left_behind(run) for run in runs]
    runs[0].paths.policies.symlink_to(runs[0].paths.policies)
    assert clean_runs(tmp_path / "runs", yes=True, only=[]) == 0
    assert f"{runs[0].paths.root} is left alone: " in capsys.readouterr().out
    assert [file.exists() for file in files] == [True, False]
    with pytest.raises(OSError, match="symbolic links"):
        clean_runs(runs[0].paths.root, yes=True, only=[])
