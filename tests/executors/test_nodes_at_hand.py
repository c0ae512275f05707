"""Nodes of a run's partitions, between passes: what is kept where sinfo gives no answer."""

from dataclasses import replace

import pytest

from pipeline.decide.places import Need
from pipeline.executors.slurm import nodes_at_hand
from pipeline.executors.slurm.nodes_at_hand import nodes_of
from pipeline.run.paths import RunPaths
from slurm.commands import NotStarted, SlurmError
from slurm.nodes import Node, Nodes
from slurm.query import parse_queue
from tests.support.damage import flip_bit

NEEDS = [Need(frozenset({"gpu"}), gpus=1)]
NODE = Node("n1", frozenset({"gpu"}), 8, 2, 1000)
OWN = "".join(
    f"7|{i}|{state}|0|0|100|200|0|1:00:00|100|0:05|cpu={cpus},node=1|N/A|gpu|n1|None|own|\n"
    for i, (state, cpus) in enumerate((("RUNNING", 4), ("PENDING", 2)))
)
ONE, TWO = Nodes((NODE,)), Nodes((NODE, NODE))


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
    answers += [ONE, SlurmError(["sinfo"], 1, "no"), NotStarted(["sinfo"], None, "no time"), TWO]
    assert nodes_of(paths, NEEDS, 1000.0).nodes == (NODE,)
    assert nodes_of(paths, NEEDS, 1500.0).nodes == (NODE,), "as they were"
    assert len(asked) == 1
    assert nodes_of(paths, NEEDS, 1700.0).nodes == (NODE,), "those of the last answer"
    assert nodes_of(paths, NEEDS, 1720.0).nodes == (NODE,)
    assert len(asked) == 2
    assert nodes_of(paths, NEEDS, 1740.0).nodes == (NODE,), "a pass without time for it"
    assert nodes_of(paths, NEEDS, 1741.0).nodes == (NODE, NODE)


def test_nothing_is_known_before_the_first_answer_nor_by_a_spoilt_file(tmp_path, sinfo):
    answers, asked = sinfo
    paths = RunPaths(tmp_path)
    answers += [SlurmError(["sinfo"], 1, "no"), ONE, ONE]
    assert nodes_of(paths, NEEDS, 1000.0).nodes == ()
    assert nodes_of(paths, NEEDS, 1040.0).nodes == (NODE,)
    flip_bit(paths.slurm / "nodes.json")
    assert nodes_of(paths, NEEDS, 1041.0).nodes == (NODE,)
    assert len(asked) == 3


def test_places_are_contended_for_a_day_after_others_had_some(tmp_path, sinfo):
    """What the user's own jobs hold, or may hold since they were seen to wait, is nobody else's."""
    answers, _ = sinfo
    paths, own = RunPaths(tmp_path), parse_queue(OWN)
    answers += [replace(ONE, allocated=6), replace(ONE, allocated=7), ONE, ONE]
    assert not nodes_of(paths, NEEDS, 1000.0, own).is_contended
    assert not nodes_of(paths, NEEDS, 1500.0, own).is_contended, "not asked again yet"
    assert nodes_of(paths, NEEDS, 1600.0, own).is_contended
    assert nodes_of(paths, NEEDS, 3000.0, own).is_contended, "they come back"
    assert not nodes_of(paths, NEEDS, 90_000.0, own).is_contended
