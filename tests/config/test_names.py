"""Names of components, files and held-out sets that metrics have already."""

import pytest

from pipeline.config.name_rules import OF_COMPONENTS, OF_EVALUATIONS, OF_REWARDS
from pipeline.metrics.catalogue import METRICS
from tests.support import tiny

RULE = "{kind: rule, function: exact_match}"
WORDS = (
    f"reward.components.mean={RULE}",
    f"reward.components.meanest={RULE}",
    "data.prompts={mean: prompts.jsonl, sums: prompts.jsonl}",
    "data.heldout={reward: prompts.jsonl}",
)


def test_each_is_refused_in_a_line_with_the_metrics_that_it_would_take(inputs, slurm_ppo, tmp_path):
    given = [
        word for word in tiny.overrides(inputs, tmp_path / "run") if not word.startswith("data.prompts=")
    ]
    done = slurm_ppo("validate", *given, *WORDS, cwd=inputs)
    assert done.returncode == 2
    said = "is another metric; choose another name"
    assert [line for line in done.stderr.splitlines() if said in line] == [
        f"error: reward.components=mean: reward/mean {said}",
        f"error: data.prompts=mean: reward/mean/mean {said}",
        f"error: data.heldout=reward: evaluate/reward {said}",
    ]


@pytest.mark.parametrize(
    ("start", "place", "taken"),
    [("reward", 1, OF_REWARDS), ("reward/*", 2, OF_COMPONENTS), ("evaluate", 1, OF_EVALUATIONS)],
)
def test_they_are_those_of_the_catalogue(start, place, taken):
    found = {metric.name.split("/")[place] for metric in METRICS if metric.name.startswith(f"{start}/")}
    assert {name for name in found if "*" not in name} == taken
