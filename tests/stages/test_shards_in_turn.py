"""Shards that one engine makes one after the other: the steps on the page follow from the lengths drawn."""

from argparse import Namespace

from benchmarks.shards_in_turn import SHARDS, Passed, drawn, line
from tests.support import ROOT

PAGE = ROOT / "docs/explanation/benchmarks.md"


def test_a_shard_takes_as_many_steps_as_its_longest_response_has_tokens():
    lengths = drawn(Namespace(mean=128, sigma=0.95, longest=896, responses=256))
    for shards in SHARDS:
        steps = sum(max(lengths[shard::shards]) for shard in range(shards))
        assert f"| {steps} | {sum(lengths) / steps:.0f} |" in PAGE.read_text()


def test_the_line_through_passes_finds_what_a_step_and_a_response_take():
    passed = [Passed(0.0, 0.01 * steps + 0.0002 * 1000, steps, 1000) for steps in (100, 200, 400)]
    step, each = line(passed)
    assert abs(step - 10) < 1e-6
    assert abs(each - 0.2) < 1e-6
