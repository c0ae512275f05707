"""What rolling out more prompts than an update learns from needs, and how it is refused."""

import pytest

from pipeline.config.issue import ConfigError
from pipeline.config.resolve import resolve
from tests.support.composed import composed_of

GROUPS = (
    "algorithm=grpo",
    "rollout.samples_per_prompt=2",
    "data.prompts_per_iteration=10",
    "update.minibatches=4",
    "algorithm.shaping.filter_groups=true",
)
TOKEN, FACTOR = "algorithm.correction.level=token", "rollout.oversample=1.5"


def config(models, tmp_path, *words):
    return resolve(composed_of(models, tmp_path / "run", *words))


@pytest.mark.parametrize(
    ("factor", "prompts"),
    [("1", 10), ("1.01", 11), ("1.1", 11), ("1.2", 12), ("1.1999999999", 12), ("2", 20)],
)
def test_a_rollout_has_the_prompts_of_an_update_times_the_factor_rounded_up(
    models, tmp_path, factor, prompts
):
    words = (TOKEN, f"rollout.oversample={factor}", "rollout.num_shards=1")
    made = config(models, tmp_path, *GROUPS, *words)
    assert made.prompts_per_rollout == prompts
    assert made.responses_per_iteration == 2 * prompts
    assert made.responses_per_update == 20, "mini-batches and the KL controller count these"


@pytest.mark.parametrize(
    "words", [[TOKEN], ["algorithm.old_log_probs=rollout"], ["rollout.carry=0"], [TOKEN, "rollout.carry=2"]]
)
def test_groups_may_wait_where_they_are_weighed_for_it(models, tmp_path, words):
    assert config(models, tmp_path, *GROUPS, "rollout.oversample=2", "rollout.num_shards=2", *words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            [*GROUPS, FACTOR],
            "^rollout.carry=1: .*nothing would weigh them for that; give 0, algorithm.correction",
        ),
        ([*GROUPS, FACTOR, "algorithm.correction.level=sequence"], "rollout.carry=1: .*give 0"),
        ([*GROUPS[:-1], FACTOR, TOKEN], "give algorithm.shaping.filter_groups=true too, or 1$"),
        ([FACTOR, TOKEN], "algorithm.estimator=gae has no groups to replace; give 1, or use grpo, "),
        ([*GROUPS, TOKEN, "rollout.oversample=0.5"], "rollout.oversample: .*greater than or equal to 1"),
        ([*GROUPS, TOKEN, "rollout.oversample=inf"], "rollout.oversample: .*finite"),
        ([*GROUPS, TOKEN, "rollout.carry=3"], "less than or equal to 2"),
        (
            [*GROUPS, TOKEN, "rollout.oversample=1.5", "rollout.num_shards=2"],
            "makes 15 prompts of .*=10, which do not divide by rollout.num_shards=2; give 1.6$",
        ),
        (
            [*GROUPS, TOKEN, FACTOR, "update.engine=tests.support.light:make_trainer"],
            "rollout.oversample=1.5: needs update.engine=deepspeed, which replaces groups",
        ),
    ],
)
def test_what_cannot_replace_groups_is_refused_in_one_line(models, tmp_path, words, why):
    shards = [] if any("num_shards" in word for word in words) else ["rollout.num_shards=5"]
    with pytest.raises(ConfigError, match=why):
        config(models, tmp_path, *words, *shards)
