"""Responses of older policies are refused on a cluster that never has places for a rollout and the update."""

import pytest

from pipeline.checks.finding import Verdict
from pipeline.checks.side_by_side import judge_side_by_side
from pipeline.cli.errors import LONGEST_LINE
from pipeline.config.compose import compose
from pipeline.config.resolve import resolve
from slurm.nodes import parse_nodes
from tests.support import tiny

WORDS = (
    "scheduler=slurm",
    "rollout.staleness=1",
    "algorithm.correction.level=token",
    "scheduler.rollout.gpus_per_node=1",
    "scheduler.update.gpus_per_node=1",
)
ONE_GPU = "gpu1|gpu*|16|64000|gpu:a100:1|mixed|16/0/0/16\n"
ONE_AWAY = "gpu2|gpu*|16|64000|gpu:a100:1|drained|0/0/16/16\n"
TWO_GPUS = "gpu1|gpu*|16|64000|gpu:a100:2|mixed|16/0/0/16\n"
OTHERS = "big1|big|64|64000|gpu:a100:8|idle|0/64/0/64\n"


def judged(inputs, tmp_path, shown, *more, most_running=None):
    given = resolve(compose(tiny.overrides(inputs, tmp_path / "run", *WORDS, *more), None))
    return [(f.verdict, f.measured) for f in judge_side_by_side(given, parse_nodes(shown), most_running)]


def test_on_a_cluster_of_one_gpu_it_is_refused_with_the_reason_and_the_way_out(inputs, tmp_path):
    ((verdict, said),) = judged(inputs, tmp_path, ONE_GPU)
    assert verdict is Verdict.PROBLEM
    assert said.startswith(
        "rollout.staleness=1: a rollout (4 CPUs, 1 GPUs) and the update (8 CPUs, 1 GPUs) never fit at once "
        "on gpu1 (16 CPUs, 1 GPUs); stages that take turns"
    )
    assert len(f"error: {said}") <= LONGEST_LINE, "all of it is shown"
    assert said.endswith("set it to 0, or give each stage a place of its own")
    assert judged(inputs, tmp_path, ONE_GPU, "rollout.staleness=0") == []


@pytest.mark.parametrize(
    ("shown", "more"),
    [
        (TWO_GPUS, ()),
        (ONE_GPU, ("scheduler.rollout.gpus_per_node=null",)),
        (ONE_GPU + OTHERS, ("scheduler.update.partition=big",)),
        (ONE_GPU + OTHERS, ("scheduler.rollout.partition=[gpu,big]", "scheduler.update.partition=gpu")),
        (OTHERS, ("scheduler.rollout.partition=gpu",)),
    ],
    ids=["two GPUs", "no GPU asked for", "a partition each", "one elsewhere", "no node at all"],
)
def test_where_both_may_be_there_at_once_nothing_is_said(inputs, tmp_path, shown, more):
    """Other people's jobs are everywhere: how many there are is nothing that stays. A stage whose jobs fit
    nowhere is refused for that alone."""
    assert judged(inputs, tmp_path, shown, *more) == []


def test_a_node_that_other_stages_alone_may_use_is_no_place(inputs, tmp_path):
    ((verdict, _),) = judged(inputs, tmp_path, ONE_GPU + OTHERS)
    assert verdict is Verdict.PROBLEM, "big is another partition than theirs, which is the default one"


def test_what_may_pass_or_may_not_hold_is_a_warning(inputs, tmp_path):
    ((verdict, said),) = judged(inputs, tmp_path, ONE_GPU + ONE_AWAY)
    assert (verdict, "until nodes are back (sinfo -R: gpu2)" in said) == (Verdict.WARNING, True), said
    ((verdict, said),) = judged(inputs, tmp_path, TWO_GPUS, most_running=1)
    assert (verdict, "if your limit of 1 running job holds" in said) == (Verdict.WARNING, True), said
    assert judged(inputs, tmp_path, TWO_GPUS, most_running=2) == []
