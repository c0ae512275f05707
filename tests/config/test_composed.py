"""Settings that tests lay over what was composed once make the configuration that Hydra makes of all."""

import pytest

from pipeline.config.compose import compose
from pipeline.config.issue import ConfigError
from tests.support import tiny
from tests.support.composed import composed_of, is_setting


@pytest.mark.parametrize(
    "words",
    [
        ("update.zero_stage=3", "update.precision=bf16", "update.learning_rate=1e-4", "iterations=7"),
        ("update.betas=[0.9,0.95]", "rollout.stop_token_ids=[]", "model.context_length=null", "name='a-b'"),
        ("rollout.vllm.enforce_eager=true", "algorithm.kl.coef=0", "rollout.engine=vllm", "seed=0"),
        ("algorithm=grpo", "algorithm.clip_range_high=0.3", "rollout.samples_per_prompt=3"),
        ("update.epochs=3", "reward=rule", "reward.components.rule.function=a:b"),
        ("+update.lora={rank: 4, alpha: 8}", "update.lora.rank=2", "evaluate.every=1"),
        ("scheduler=slurm", "scheduler.update.time=1:00:00", "scheduler.reward.gpus_per_node=a100:2"),
        ("scheduler.slots=2", "scheduler.gpus=0", "scheduler.update.ranks=2"),
        ("+reward.components.other.path=a", "+reward.components.other.kind=model", "update.epochs=1"),
    ],
    ids=lambda words: words[0],
)
def test_the_same_is_composed(inputs, tmp_path, words):
    assert composed_of(inputs, tmp_path, *words) == compose(tiny.overrides(inputs, tmp_path, *words))


@pytest.mark.parametrize("word", ["update.epoch=2", "update.epochs=x", "update=x", "update.epochs=1,2"])
def test_the_same_is_refused(inputs, tmp_path, word):
    said = []
    for make in (composed_of, lambda inputs, place, word: compose(tiny.overrides(inputs, place, word))):
        with pytest.raises(ConfigError) as refused:
            make(inputs, tmp_path, word)
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_what_only_hydra_can_place_is_left_to_it():
    assert is_setting("update.epochs=2")
    assert not any(map(is_setting, ["+a.b=1", "algorithm=grpo", "update.lora={rank: 2}", "~seed", "a.b=~/x"]))
