"""Seconds by an earlier run and by FLOPs; lengths of prompts."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    CorrectionLevel,
    Estimator,
    KLConfig,
    OldLogProbs,
)
from pipeline.config.reward import RewardConfig, RuleConfig
from pipeline.config.schema import Config, DataConfig, ModelConfig
from pipeline.config.update import UpdateConfig
from pipeline.forecast.cards import kind_of, peak_flops
from pipeline.forecast.lengths import lengths_of
from pipeline.forecast.seconds import (
    EarlierRun,
    StageFlops,
    by_earlier,
    by_flops,
    update_passes,
    work_of,
)

CONFIG = Config(
    name="x",
    iterations=10,
    model=ModelConfig(policy="p"),
    data=DataConfig(prompts="a", prompts_per_iteration=8),
    reward=RewardConfig(components={"brevity": RuleConfig(function="mine:brevity")}),
)
SECONDS = {"rollout": 10.0, "reward": 2.0, "update": 20.0}


def earlier(config: Config = CONFIG) -> EarlierRun:
    return EarlierRun("before", 5, work_of(config, 30.0, 70.0), SECONDS, 35.0)


def test_the_same_work_takes_the_same_time():
    found = by_earlier(CONFIG, work_of(CONFIG, 30.0, 70.0), earlier())
    assert found.stages == SECONDS
    assert (found.iteration, found.run) == (35.0, 350.0)
    assert found.ground == "measured in before, median of 5 iterations, times 1.00 the tokens"


def test_twice_the_tokens_take_twice_as_long_but_for_what_lies_between_stages():
    found = by_earlier(CONFIG, work_of(CONFIG, 60.0, 140.0), earlier())
    assert found.iteration == 2 * 32.0 + 3.0


def test_stages_that_overlapped_do_so_again_in_proportion():
    found = by_earlier(CONFIG, work_of(CONFIG, 60.0, 140.0), replace(earlier(), iteration=24.0))
    assert found.iteration == pytest.approx(2 * 24.0)


def test_more_epochs_lengthen_the_update_alone():
    more = replace(CONFIG, update=UpdateConfig(epochs=2 * CONFIG.update.epochs))
    found = by_earlier(more, work_of(more, 30.0, 70.0), earlier())
    assert found.stages["rollout"] == 10.0
    assert found.stages["update"] == pytest.approx(20.0 * update_passes(more) / update_passes(CONFIG))
    assert 20.0 < found.stages["update"] < 40.0


def test_a_pass_for_old_log_probabilities_counts_where_one_is_made():
    def passes(update: UpdateConfig, **algorithm: Any) -> float:
        given = AlgorithmConfig(estimator=Estimator.GRPO, kl=KLConfig(coef=0.0), **algorithm)
        return update_passes(replace(CONFIG, algorithm=given, update=update))

    several, one = UpdateConfig(minibatches=2), UpdateConfig(minibatches=1)
    assert passes(several) == passes(several, old_log_probs=OldLogProbs.ROLLOUT) + 1
    assert passes(one) == passes(one, old_log_probs=OldLogProbs.ROLLOUT)
    assert passes(one, correction=CorrectionConfig(level=CorrectionLevel.TOKEN)) == passes(one) + 1


def test_flops_are_divided_by_the_named_share_of_the_peak():
    update = StageFlops("update", 6e15, 1e15, 0.3, "assumed, not measured")
    found = by_flops(CONFIG, [update], ["rollout"])
    assert found.stages == {"update": pytest.approx(20.0)}
    assert found.ground.endswith("of which: update 30% (assumed, not measured)")
    assert found.left_out == ("rollout",)
    assert by_flops(CONFIG, [], ["rollout", "update"]) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA A100-SXM4-80GB", 312e12), ("gpu:h200", 989e12), ("Tesla T4", 65e12), ("Tesla P100", None)],
)
def test_cards_have_the_peak_of_their_data_sheet(name, peak):
    assert peak_flops(kind_of(name)) == peak


def test_lengths_have_the_median_and_the_length_of_most():
    found = lengths_of("data.prompts", [*range(1, 21), 500], 3)
    assert (found.shortest, found.median, found.most, found.longest, found.num_over) == (1, 11, 20, 500, 3)
    assert lengths_of("data.prompts", [], 3) is None
