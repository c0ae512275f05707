"""A config.json with another number of layers than the weights have is refused; none that fits is.

With SOAK_ROUNDS=20, as `make soak` has it, all families of models are tried instead of a few.
"""

import json
import os
import random
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from pipeline.config.model_classes import installed_classes
from pipeline.config.model_files import read_json, read_tensors
from pipeline.config.trainable import _COUNTS, weight_doubts, why_other_depth
from pipeline.config.update import Precision
from stages.context import UserError
from stages.models.loading import load_causal_lm, load_reward_model
from stages.ppo.critics import load_critic
from tests.support.families import FAMILIES, family, settings_of

SAMPLE = ["deepseek_v3", "gemma3n_text", "granitemoe", *random.Random(3).sample(sorted(FAMILIES), 1)]
NAMES = sorted(FAMILIES if int(os.environ.get("SOAK_ROUNDS", "1")) > 1 else SAMPLE)
CLASSES = installed_classes()
assert CLASSES
UNCLEAR = {"bart", "zamba2"}
"""Families of which config.json alone does not say how many layers they have: the first task does."""


def problem_at_validate(folder: Path) -> str | None:
    return why_other_depth(read_json(folder / "config.json") or {}, read_tensors(folder), CLASSES)


def loads(folder: Path, model: PreTrainedModel) -> None:
    """Load a model as what it was saved as, and as a critic, without its weights."""
    load = load_causal_lm if "Sequence" not in type(model).__name__ else load_reward_model
    load(folder, Precision.FP32, False, "meta")
    if type(model).__name__ != "BartForCausalLM":  # whose critic has an encoder
        load_critic(folder, Precision.FP32, False, device_map="meta")


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_every_family_fits_its_own_configuration_and_no_other(name, tmp_path):
    model = family(name)
    model.save_pretrained(tmp_path)
    assert problem_at_validate(tmp_path) is None
    assert not list(weight_doubts(read_json(tmp_path / "config.json") or {}, read_tensors(tmp_path)))
    loads(tmp_path, model)
    written = json.loads((tmp_path / "config.json").read_text())
    counts = {key: value for key, value in written.items() if key in _COUNTS}
    for more in (-1, 1) if counts and name not in UNCLEAR else ():
        changed = written | {key: value + more for key, value in counts.items()}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        assert "layers" in str(problem_at_validate(tmp_path))


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in NAMES if name in CLASSES.scoring])
def test_a_reward_model_of_every_family_fits_its_own_configuration(name, tmp_path):
    config = AutoConfig.for_model(name, num_labels=1, **settings_of(name))
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path)
    assert problem_at_validate(tmp_path) is None
    loads(tmp_path, model)


def test_what_no_setting_counts_is_found_by_the_models_class(tmp_path):
    family("zamba2").save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    fewer = {"num_hidden_layers": 2, "layers_block_type": written["layers_block_type"][:2]}
    (tmp_path / "config.json").write_text(json.dumps(written | fewer))
    assert problem_at_validate(tmp_path) is None
    with pytest.raises(UserError, match=r"leaves out by its config.json: .*layers\.2\."):
        load_causal_lm(tmp_path, Precision.FP32, False, "meta")
