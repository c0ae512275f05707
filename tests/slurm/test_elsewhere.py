"""Jobs that go back into the queue for another node than theirs."""

import os
import subprocess
import sys

import pytest

from tests.support import ROOT

SHOWN = "JobId=78 JobName=driver Partition=cpu,all ReqNodeList=(null) ExcNodeList=(null) Features=(null)"
NODES = "bad|cpu*|4|1000|(null)|idle|0/4/0/4\ngood|cpu*|4|1000|(null)|mixed|2/2/0/4\n"
GO_BACK = "from slurm.elsewhere import requeue_elsewhere as go; import os; go('78', 'bad'); print('alive')"


@pytest.fixture
def go_back(tmp_path):
    """Has a process on node ``bad`` go back. Returns what scontrol was told, and what the process said."""

    def run(shown: str = SHOWN, nodes: str = NODES, code: int = 0) -> tuple[list[str], str]:
        told = tmp_path / "told"
        programs = {
            # as slurmd does to the processes of a job that is requeued
            "scontrol": f'echo "$@" >>{told}\ncase "$*" in *show*) echo "{shown}" ;; *requeue*) '
            f"kill -TERM $PPID; exit {code} ;; esac",
            "sinfo": f"printf '{nodes}'",
        }
        for name, text in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", GO_BACK], env=environment, capture_output=True, text=True, timeout=60
        )
        return told.read_text().splitlines(), done.stdout

    return run


def test_its_node_is_excluded_once_it_is_back_in_the_queue_although_slurm_ends_its_processes(go_back):
    assert go_back() == (["-o show job 78", "requeue 78", "update jobid=78 excnodelist=bad"], "alive\n")


@pytest.mark.parametrize(
    ("shown", "nodes"),
    [
        (SHOWN.replace("ExcNodeList=(null)", "ExcNodeList=other"), NODES),
        (SHOWN.replace("Features=(null)", "Features=bigmem"), NODES),
        (f"{SHOWN} Reservation=maintenance", NODES),
        (f"{SHOWN}\nJobId=79 Partition=cpu", NODES),
        (SHOWN, NODES.replace("mixed", "down*")),
        (SHOWN, ""),
        ("slurm_load_jobs error", NODES),
    ],
    ids=["excludes", "features", "reserved", "array", "no other node", "no answer", "no job"],
)
def test_where_another_node_is_not_sure_it_goes_back_as_it_is(go_back, shown, nodes):
    told, _ = go_back(shown, nodes)
    assert told[-1] == "requeue 78"
