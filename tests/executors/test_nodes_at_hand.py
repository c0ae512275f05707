"""Nodes of a run's partitions, between passes: what is kept where sinfo gives no answer."""

import pytest

from pipeline.executors.slurm import nodes_at_hand
from pipeline.executors.slurm.nodes_at_hand import nodes_of
from pipeline.orchestrate.places import Need
from pipeline.run.paths import RunPaths
from slurm.commands import NotStarted, SlurmError
from slurm.nodes import Node
from tests.support.damage import flip_bit

NEEDS = [Need(frozenset({"gpu"}), gpus=1)]
NODE = Node("n1", frozenset({"gpu"}), 8, 2, 1000)


@pytest.fixture
def sinfo(monkeypatch):
    """Answers, or errors, one after the other; and how often it was asked."""
    answers, asked = [], []

    def read(partitions):
        asked.append(partitions)
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(nodes_at_hand, "read_nodes", read)
    return answers, asked


def test_a_failing_sinfo_takes_no_nodes_away_and_is_asked_again_soon(tmp_path, sinfo):
    answers, asked = sinfo
    paths = RunPaths(tmp_path)
    answers += [[NODE], SlurmError(["sinfo"], 1, "no"), NotStarted(["sinfo"], None, "no time"), [NODE, NODE]]
    assert nodes_of(paths, NEEDS, 1000.0) == (NODE,)
    assert nodes_of(paths, NEEDS, 1500.0) == (NODE,), "as they were"
    assert len(asked) == 1
    assert nodes_of(paths, NEEDS, 1700.0) == (NODE,), "those of the last answer"
    assert nodes_of(paths, NEEDS, 1720.0) == (NODE,)
    assert len(asked) == 2
    assert nodes_of(paths, NEEDS, 1740.0) == (NODE,), "a pass without time for it"
    assert nodes_of(paths, NEEDS, 1741.0) == (NODE, NODE)


def test_nothing_is_known_before_the_first_answer_nor_by_a_spoilt_file(tmp_path, sinfo):
    answers, asked = sinfo
    paths = RunPaths(tmp_path)
    answers += [SlurmError(["sinfo"], 1, "no"), [NODE], [NODE]]
    assert nodes_of(paths, NEEDS, 1000.0) == ()
    assert nodes_of(paths, NEEDS, 1040.0) == (NODE,)
    flip_bit(paths.slurm / "nodes.json")
    assert nodes_of(paths, NEEDS, 1041.0) == (NODE,)
    assert len(asked) == 3
