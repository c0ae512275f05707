"""Nodes of partitions, as sinfo says them, and Slurm's notation of their names."""

from slurm.nodes import Node, node_names, parse_nodes

SHOWN = """\
gpu1|a100|64|515000|gpu:a100:4(S:0-1)|mixed|16/48/0/64
gpu1|all*|64|515000|gpu:a100:4(S:0-1)|mixed|16/48/0/64
gpu2|a100|64|515000|gpu:a100:4|drained|8/0/56/64
cpu1|all*|128+|257000|(null)|idle|0/128/0/128
gpu3|a100|64|515000|gpu:a100:2,gpu:v100:2,nvme:1|allocated~|64/0/0/64
"""


def test_a_node_has_the_partitions_of_all_its_lines_and_the_default_one_also_without_a_name():
    found = {node.name: node for node in parse_nodes(SHOWN).nodes}
    assert found["gpu1"] == Node("gpu1", frozenset(["a100", "all", ""]), 64, 4, 515000)
    assert found["cpu1"] == Node("cpu1", frozenset(["all", ""]), 128, 0, 257000)
    assert found["gpu3"].gpus == 4, "of both types"


def test_a_node_that_takes_no_jobs_is_away():
    found = parse_nodes(SHOWN)
    assert "gpu2" not in {node.name for node in found.nodes}
    assert found.away == (Node("gpu2", frozenset(["a100"]), 64, 4, 515000),)


def test_what_jobs_hold_counts_once_for_a_node_of_two_partitions():
    assert parse_nodes(SHOWN).allocated == 16 + 64


def test_names_of_nodes():
    assert node_names("") == ()
    assert node_names("update1") == ("update1",)
    assert node_names("gpu[01-03,7],login") == ("gpu01", "gpu02", "gpu03", "gpu7", "login")
    assert node_names("r1-gpu[1-2]-ib") == ("r1-gpu1-ib", "r1-gpu2-ib")
