"""DeepSpeed knows every key of its settings as we render them, and says nothing against any of them."""

import itertools
import logging

import pytest

from pipeline.config.update import Precision, UpdateConfig
from stages.models.numerics import import_deepspeed
from stages.ppo.zero import engine_settings

FORMATS = (Precision.FP32, Precision.BF16, Precision.FP16)
CASES = [
    UpdateConfig(zero_stage=stage, precision=precision, offload_optimizer=offload)
    for stage, precision, offload in itertools.product(range(4), FORMATS, (False, True))
]


class Read(dict):
    """A mapping that notes which of its keys are read: DeepSpeed drops those it does not know in silence."""

    def __init__(self, content: dict) -> None:
        super().__init__({k: Read(v) if isinstance(v, dict) else v for k, v in content.items()})
        self.read: set[str] = set()

    def get(self, key, default=None):
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def __deepcopy__(self, memo):
        return self


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    "config", CASES, ids=lambda c: f"zero{c.zero_stage}-{c.precision}{'-offload' * c.offload_optimizer}"
)
def test_deepspeed_knows_every_setting(config, backend, caplog, monkeypatch, recwarn):
    import_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger

    monkeypatch.setattr(logger, "propagate", True)
    given = Read(engine_settings(config, 1000, backend))
    with caplog.at_level(logging.WARNING, logger=logger.name):
        made = DeepSpeedConfig(given)
    assert given.keys() - given.read == set()
    assert [record.getMessage() for record in caplog.records] == []
    assert [str(warning.message) for warning in recwarn] == []

    assert made.zero_config.stage == config.zero_stage
    assert made.bfloat16_config.enabled == (config.precision is Precision.BF16)
    assert made.float16_config.enabled == (config.precision is Precision.FP16)
    assert (made.grad_accum_dtype == "fp32") == (config.precision is not Precision.FP32)
    assert (made.zero_config.offload_optimizer is not None) == config.offload_optimizer


def test_a_key_that_deepspeed_does_not_know_is_found():
    import_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig

    given = Read({**engine_settings(UpdateConfig(precision=Precision.FP32), 1000), "gradient_clip": 1.0})
    DeepSpeedConfig(given)
    assert given.keys() - given.read == {"gradient_clip"}
    with pytest.raises(ValueError, match="overlap_com"):
        DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": 2, "overlap_com": True}})


@pytest.mark.parametrize("stage", range(4))
def test_gradients_are_reduced_while_others_are_computed_on_gpus_alone(stage):
    config = UpdateConfig(precision=Precision.FP32, zero_stage=stage, offload_optimizer=stage > 0)
    of_cpus = engine_settings(config, 10**9)["zero_optimization"]
    of_gpus = engine_settings(config, 10**9, "nccl")["zero_optimization"]
    assert "overlap_comm" not in of_cpus
    assert of_gpus.get("overlap_comm", False) == (stage in (1, 2))
    buckets = 2 if stage in (1, 2) else 1
    assert of_gpus["reduce_bucket_size"] * buckets == of_cpus["reduce_bucket_size"], "memory of both buckets"
    for settings, is_pinned in ((of_cpus, False), (of_gpus, True)):
        assert settings.get("offload_optimizer", {}).get("pin_memory", False) == (is_pinned and stage > 0)
