"""What responses of older policies (rollout.staleness) need, and where they are refused."""

import pytest

from pipeline.config.issue import ConfigError
from pipeline.config.resolve import resolve
from pipeline.config.staleness_rules import staleness_warnings
from pipeline.executors.allocation import allocation_limits
from pipeline.executors.devices import ONLY
from pipeline.executors.local_limits import local_limits
from slurm.allocation import NodeShare
from tests.support.composed import composed_of

TOKEN, ROLLOUT = "algorithm.correction.level=token", "algorithm.old_log_probs=rollout"
GROUPS = ("algorithm=grpo", "rollout.samples_per_prompt=2")


def config(inputs, tmp_path, *words):
    return resolve(composed_of(inputs, tmp_path / "run", *words))


@pytest.mark.parametrize(
    "words",
    [
        [TOKEN],
        ["algorithm.correction.level=geometric"],
        ["algorithm.correction={level: token, mode: m2po}"],
        [*GROUPS, ROLLOUT],
    ],
)
def test_a_correction_by_token_or_mean_or_a_ratio_to_the_writer_is_taken(inputs, tmp_path, words):
    made = config(inputs, tmp_path, "rollout.staleness=1", *words)
    assert made.rollout.staleness == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["rollout.staleness=1"], "nothing would weigh them for that; give token or geometric"),
        (
            ["rollout.staleness=2", "algorithm.correction.level=sequence"],
            "grows or vanishes with its length, so that a few responses would have all the weight",
        ),
        (["rollout.staleness=3", TOKEN], "less than or equal to 2"),
        (["rollout.staleness=1", *GROUPS], "give token or geometric, or algorithm.old_log_probs=rollout$"),
        (
            [ROLLOUT],
            "is for the estimators grpo, reinforce...baseline, rloo, and algorithm.estimator=gae; use one, "
            "or set this to trainer$",
        ),
        (
            [*GROUPS, ROLLOUT, TOKEN],
            "would weigh them twice; set algorithm.correction.level=none, or set this to trainer$",
        ),
        (
            [*GROUPS, ROLLOUT, "algorithm.target_kl=0.1"],
            "not computed; leave it out, or set this to trainer$",
        ),
        ([*GROUPS, ROLLOUT, "rollout.top_p=0.9"], "old_log_probs=rollout needs the probability with which"),
        (["algorithm.correction={level: geometric, mode: m2po}"], "level=geometric; set that to token$"),
        (["algorithm.correction.mode=m2po"], "bounds ratios of tokens, and .*level=none; set that to token$"),
    ],
)
def test_what_is_not_weighed_or_too_old_is_refused(inputs, tmp_path, words, why):
    with pytest.raises(ConfigError, match=why):
        config(inputs, tmp_path, *words)


def test_the_bias_of_values_is_warned_of(inputs, tmp_path):
    def said(*words):
        return list(staleness_warnings(config(inputs, tmp_path, TOKEN, *words)))

    assert "advantages are biased" in said("rollout.staleness=2")[0]
    assert said("rollout.staleness=1") == []
    assert said("rollout.staleness=2", "algorithm=rloo", "rollout.samples_per_prompt=2") == []


def test_on_one_device_of_this_machine_it_is_refused(inputs, tmp_path, monkeypatch):
    monkeypatch.delenv(ONLY, raising=False)
    words = ["rollout.staleness=1", TOKEN, "scheduler.rollout.gpus=1", "scheduler.update.gpus=1"]
    with pytest.raises(
        ConfigError, match="a rollout and the update need 2 GPUs at once, and there are 1; sta"
    ):
        local_limits(config(inputs, tmp_path, *words, "scheduler.gpus=[0]"))
    assert local_limits(config(inputs, tmp_path, *words, "scheduler.gpus=[0,1]")).needs
    local_limits(config(inputs, tmp_path, *words[2:], "scheduler.gpus=[0]"))
    with pytest.raises(ConfigError, match="one task at a time is done here"):
        local_limits(config(inputs, tmp_path, *words[:2], "scheduler.slots=1"))


def test_in_an_allocation_in_which_both_do_not_fit_it_is_refused(inputs, tmp_path):
    words = ["scheduler=allocation", "rollout.staleness=1", TOKEN]
    words += ["scheduler.rollout.gpus_per_node=1", "scheduler.update.gpus_per_node=1"]
    with pytest.raises(ConfigError, match="a rollout and the update do not fit at once; allocation 7 has n1"):
        allocation_limits(config(inputs, tmp_path, *words), "7", [NodeShare("n1", 16, 0, 1)])
    assert allocation_limits(config(inputs, tmp_path, *words), "7", [NodeShare("n1", 16, 0, 2)]).needs
