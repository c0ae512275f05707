"""A run's directory as 0.1.0 writes it: every later version reads it.

``PIN=1`` pins the archive again, which is right only until 0.1.0 is released.
"""

import json
import os
import tarfile
from pathlib import Path

import pytest

from tests.support import ROOT

ARCHIVE = ROOT / "tests/golden/run_format_1.tar.gz"
EXPECTED = {"state": "complete", "iterations_done": 2, "evaluations_done": 3, "best": 2}


def without_report(file: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Nothing reads it."""
    return None if file.name == "run/report.html" else file


@pytest.fixture
def run(complete_run, tmp_path) -> Path:
    """The run, unpacked in a place that it has never been in."""
    if "PIN" in os.environ:
        with tarfile.open(ARCHIVE, "w:gz") as archive:
            archive.add(complete_run, "run", filter=without_report)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def test_commands_that_look_read_it(run, slurm_ppo):
    status = json.loads(slurm_ppo("status", run, "--json").stdout)
    assert {key: status[key] for key in EXPECTED} == EXPECTED
    for words in (["report", run], ["samples", run, "--json"], ["plan", run], ["logs", run, "update@1"]):
        done = slurm_ppo(*words)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_it_goes_on_and_gives_its_policies_away(run, slurm_ppo, tmp_path):
    assert slurm_ppo("resume", run).returncode == 0
    done = slurm_ppo("export", run, tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "exported/model.safetensors").is_file()
