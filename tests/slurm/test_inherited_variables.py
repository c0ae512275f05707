"""Submitting from inside a job, or with a profile that sets sbatch's options: the settings count."""

import gzip
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.compose import compose
from pipeline.config.resolve import with_cluster
from slurm.commands import run_command
from tests.support import ROOT
from tests.support.scripted import imagined_run, rendered

TABLE = ROOT / "tests/golden/slurm/sbatch_variables.txt"
ROWS = [line.split() for line in TABLE.read_text().splitlines() if not line.startswith("#")]
VARIABLES = sorted({name for _, name in ROWS})
KEPT = {"SLURM_CONF"}
"""What says which Slurm is meant, and nothing of jobs."""
OURS = {"SLURM_BITSTR_LEN", "SLURM_TIME_FORMAT"}
SPANK = "_SLURM_SPANK_OPTION_pyxis_container_image"
"""What a plug-in's option of sbatch, here a container's, leaves in the job for its steps."""
MANUAL = Path("/usr/share/man/man1/sbatch.1.gz")


@pytest.mark.skipif(not MANUAL.exists(), reason="no manual of sbatch is installed here")
def test_the_table_has_every_variable_of_the_installed_manual():
    text = gzip.decompress(MANUAL.read_bytes()).decode()
    section = text.partition('.SH "INPUT ENVIRONMENT VARIABLES"')[2].partition("\n.SH ")[0]
    named = set(re.findall(r"(?:SBATCH|SLURM)_[A-Z0-9_]+", section))
    assert named
    assert named <= set(VARIABLES)


@pytest.fixture
def profile(monkeypatch):
    """Set all of them, as no shell would at once."""
    for name in [*VARIABLES, SPANK]:
        monkeypatch.setenv(name, "all" if name == "SLURM_CLUSTERS" else "7")


def test_none_of_them_reaches_slurms_commands_or_the_jobs_that_are_submitted(tmp_path, monkeypatch, profile):
    for name in ("sbatch", "squeue"):
        (tmp_path / name).write_text("#!/bin/sh\nenv\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name in ("sbatch", "squeue"):
        left = re.findall(r"^(_?(?:SLURM|SBATCH)_\w+)=", run_command([name]), re.MULTILINE)
        assert set(left) == KEPT | OURS


WORDS = (
    *("name=r1", "run_dir=/runs/r1", "model.policy=/policy", "data.prompts=/prompts"),
    *("data.prompts_per_iteration=8", "reward=rule", "reward.components.rule.function=a:b"),
    *("scheduler=slurm", "scheduler.python=/env/bin/python"),
)


def scripts_now() -> dict[str, str]:
    config = with_cluster(compose(WORDS), os.environ)
    return rendered(replace(imagined_run(), config=config))


def test_scripts_are_the_same_whatever_a_shell_has_set(monkeypatch):
    plain = scripts_now()
    for name in [*VARIABLES, SPANK]:
        monkeypatch.setenv(name, "far" if name == "SLURM_CLUSTERS" else "7")
    assert scripts_now() == plain


def test_the_cluster_that_a_shell_asks_is_the_runs(monkeypatch):
    """A site's module may choose one of several so: the user's own squeue asks it."""
    monkeypatch.setenv("SLURM_CLUSTERS", "far")
    assert with_cluster(compose(WORDS), os.environ).scheduler.cluster == "far"
    given = compose([*WORDS, "scheduler.options={clusters: near}"])
    assert with_cluster(given, os.environ).scheduler.cluster == "near", "what is given counts"
    monkeypatch.delenv("SLURM_CLUSTERS")
    assert with_cluster(compose(WORDS), os.environ).scheduler.cluster == ""
    local = compose([*WORDS[:-2], "scheduler=local"])
    assert with_cluster(local, {"SLURM_CLUSTERS": "far"}) == local
