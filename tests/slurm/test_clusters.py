"""Commands for one of several clusters: each names it, but in a job there, and answers are read as ever."""

import os

import pytest

from slurm import signals
from slurm.commands import on_cluster, run_command
from slurm.ended import find_by_name, read_ended
from slurm.limits import read_limits
from slurm.query import read_queue
from slurm.submission import cancel, submit_script, update_dependency
from tests.support import ROOT

RECORDED = ROOT / "tests/golden/slurm/24.11"
ROW = "7|0|RUNNING|0|0|1|2|3|10:00|9|0:01|cpu=1,node=1|N/A|gpu|n1|None|mine|"
LINES = {
    "sbatch": "echo 'sbatch: routed to partition gpu' >&2; echo '4711;far'",
    # As Slurm's page on several clusters shows it; some versions print the heading even with --noheader.
    "squeue": f"echo 'CLUSTER: far'; echo '{ROW}'",
    "sinfo": "echo 'CLUSTER: far'",
    "scontrol": f"cat {RECORDED}/config.txt",
    "scancel": "",
    "sacct": "",
    "sacctmgr": "",
    "srun": "",
}


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """Return the command lines that Slurm's programs were called with."""
    folder, log = tmp_path / "bin", tmp_path / "log"
    folder.mkdir()
    for name, text in LINES.items():
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{log}\n{text}\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    return lambda: log.read_text().splitlines()


def everything(script) -> None:
    """Call each of the commands that a run needs."""
    assert submit_script(script) == "4711"
    assert [element.name for element in read_queue(lambda name: True)] == ["mine"]
    assert find_by_name(["mine"]) == {"mine": "7"}
    assert read_ended(["7"]) == {}
    assert read_limits().name == "q24"
    assert run_command(["sinfo", "-h"]) == ""
    update_dependency("7", "afterany:6")
    cancel(["7"], only_pending=True)
    errands = signals.Errands(print)
    errands.ring(["7_0"])
    errands.finish()


def test_every_command_names_the_cluster_and_understands_the_answer(typed, tmp_path):
    with on_cluster("far"):
        everything(tmp_path / "script")
    calls = typed()
    assert {call.split()[0] for call in calls} == LINES.keys() - {"srun"}
    named = [call.split()[1] == "--clusters=far" for call in calls if not call.startswith("sacctmgr")]
    assert all(named)
    # The database that all clusters share is asked for what is of this one.
    associations = [call for call in calls if call.startswith("sacctmgr") and "show assoc" in call]
    assert associations
    assert all(" cluster=q24 " in call for call in associations)


@pytest.mark.parametrize(
    ("cluster", "here"), [("", ""), ("far", "far")], ids=["one cluster", "in a job there"]
)
def test_where_none_is_named_or_in_a_job_of_that_cluster_none_is_looked_up(
    typed, tmp_path, monkeypatch, cluster, here
):
    """A name is looked up in accounting, which may be away, or which the site does without."""
    monkeypatch.setenv("SLURM_CLUSTER_NAME", here)
    with on_cluster(cluster):
        everything(tmp_path / "script")
    assert not any("--clusters" in call for call in typed())


def test_a_job_of_another_cluster_names_it(typed, monkeypatch):
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "near")
    with on_cluster("far"):
        cancel(["7"], only_pending=False)
    cancel(["8"], only_pending=False)
    assert typed() == ["scancel --clusters=far 7", "scancel 8"]
