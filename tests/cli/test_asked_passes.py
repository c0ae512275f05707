"""Passes that workers ask for, where Slurm does not take what they submit."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli import queue
from pipeline.config.scheduler import ResourcesConfig
from pipeline.run.bookkeeping import ask_for_pass, is_wanted, read_last
from slurm.commands import OWN, clean_environment
from slurm.submission import Refused
from tests.support import reportrun


@pytest.fixture
def run(tmp_path, monkeypatch):
    """One whose workers have asked for a pass; the process for it is told to end after that."""
    made = reportrun.make_run(tmp_path / "run", scheduler=reportrun.SLURM)
    ask_for_pass(made.paths)
    with Path(os.devnull).open() as orders:
        monkeypatch.setattr(sys, "stdin", orders)
        yield made


def test_what_slurm_refuses_is_asked_for_again_with_the_next_pass_and_not_at_once(run, monkeypatch, capfd):
    def refuse(run, watcher, max_age):
        raise Refused("sbatch refused it: invalid account")

    monkeypatch.setattr(queue, "make_pass", refuse)
    assert queue.asked_passes(run.paths.root) == 0
    assert "invalid account" in capfd.readouterr().err
    assert not is_wanted(run.paths)
    assert read_last(run.paths).number == 1, "nobody who leaves waits for another"


def test_a_pass_that_fails_in_any_other_way_is_wished_for_again(run, monkeypatch, capfd):
    def fail(run, watcher, max_age):
        raise OSError("no space left on device")

    monkeypatch.setattr(queue, "make_pass", fail)
    assert queue.asked_passes(run.paths.root) == 1
    assert "no space left" in capfd.readouterr().err
    assert is_wanted(run.paths)
    assert (read_last(run.paths).number, read_last(run.paths).failures) == (0, 1)


def test_what_a_stage_has_in_its_environment_is_not_inherited_by_jobs_of_others(tmp_path, monkeypatch):
    """Its worker's pass submits them, and sbatch passes the whole environment on."""
    own = {"MY_FLAG": "1", "LD_LIBRARY_PATH": "/opt/lib"}
    scheduler = replace(reportrun.SLURM, rollout=ResourcesConfig(partition=("gpu",), environment=own))
    made = reportrun.make_run(tmp_path / "run", scheduler=scheduler)
    ask_for_pass(made.paths)
    for name, value in {**own, "OF_THE_USER": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_NAME", f"demo.{made.identity.id}.1.rollout.1.0")
    monkeypatch.setenv(OWN, "")
    inherited = {}
    monkeypatch.setattr(
        queue, "make_pass", lambda run, watcher, max_age: inherited.update(clean_environment(os.environ))
    )
    with Path(os.devnull).open() as orders:
        monkeypatch.setattr(sys, "stdin", orders)
        assert queue.asked_passes(made.paths.root) == 0
    assert inherited["OF_THE_USER"] == "2"
    assert "MY_FLAG" not in inherited
    assert "WORLD_SIZE" not in inherited
    assert inherited["LD_LIBRARY_PATH"] == "/opt/lib", "the pass's own programs may need it"
