"""Whatever the family of the policy, rollout and update agree on its log-probabilities, padded or not."""

import random

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3Config,
    PreTrainedModel,
)

from stages.engines import padding
from stages.engines.base import Sampling, SequenceLimits
from stages.engines.padding import Batching, batching_of
from stages.engines.transformers import TransformersGenerator, TransformersScorer
from stages.models.loading import freeze_other_senses
from stages.ppo.batching import Row, collate
from stages.ppo.forward import response_log_probs
from tests.support.families import (
    CONTEXT,
    FAMILIES,
    NOT_PADDED,
    PROMPTS,
    VOCABULARY,
    family,
    gap,
    gaps_of,
    requests,
    settings_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")
BUDGET = 1 << 20
SLOW = {"falcon_h1", "kimi_linear", "nemotron_h"}
SAMPLE = sorted(random.Random(30).sample(sorted(FAMILIES.keys() - NOT_PADDED.keys() - SLOW), 12))
"""Of those that are padded; benchmarks/families.py goes over all."""
EXACT = 1e-5
"""Nats per token, in fp32."""
LIMITS = SequenceLimits(CONTEXT, VOCABULARY)


@pytest.mark.parametrize("name", sorted({*NOT_PADDED, *SAMPLE}))
def test_rollout_and_update_agree(name):
    model = family(name)
    found = gaps_of(TransformersGenerator(model, BUDGET, CONTEXT), model)
    assert found.together <= EXACT
    assert found.alone <= EXACT


@pytest.mark.parametrize("name", sorted(NOT_PADDED))
def test_a_model_that_answers_differently_beside_others_is_found(name, monkeypatch):
    model = family(name)
    generator = TransformersGenerator(model, BUDGET, CONTEXT)
    assert generator.batching() is NOT_PADDED[name]
    planned = [[PROMPTS[i] for i in batch] for batch in generator.plan(requests())]
    each = [[5], [19], [11], [5], [3]]
    assert planned == (each if NOT_PADDED[name] is Batching.ALONE else [[3], [5, 5], [11], [19]])
    monkeypatch.setattr(padding, "_TOLERANCE", {torch.float32: 1e9})
    careless = TransformersGenerator(model, BUDGET, CONTEXT)
    assert gap(model, requests(), careless.generate(requests(), Sampling())) > 100 * EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mamba", "mixtral", "qwen3_next"])
def test_rounding_is_no_difference(name, dtype):
    assert batching_of(family(name, scale=1.0).to(dtype), LIMITS) is Batching.PADDED


@pytest.mark.parametrize("name", ["mixtral", "granitemoe"])
def test_logits_of_routers_are_switched_off_to_generate_and_it_is_said(name, caplog):
    """With them, transformers computes a loss whose sizes do not go together after a prompt."""
    plain, model = family(name), family(name)
    model.config.output_router_logits = True
    generator = TransformersGenerator(model, BUDGET, CONTEXT)
    assert f"{type(model).__name__}: output_router_logits of its config.json is switched off" in caplog.text
    wanted = TransformersGenerator(plain, BUDGET, CONTEXT).generate(requests(), Sampling())
    assert generator.generate(requests(), Sampling()) == wanted


def test_one_row_needs_no_trial(monkeypatch):
    monkeypatch.setattr("stages.engines.transformers.batching_of", None)
    assert TransformersGenerator(family("rwkv"), BUDGET, CONTEXT).plan(requests()[:1]) == [[0]]


def test_a_context_without_room_for_a_trial_is_not_padded():
    assert batching_of(family("llama"), SequenceLimits(8, VOCABULARY)) is Batching.ALONE


def test_what_only_images_go_through_is_frozen():
    """Weight decay would change it, though nothing is learned there."""
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = size | {"vocab_size": VOCABULARY, "num_key_value_heads": 1, "head_dim": 8}
    vision = size | {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = AutoModelForCausalLM.from_config(config)
    freeze_other_senses(model)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    named = {name for name, _ in model.named_parameters()}
    assert frozen == {name for name in named if "vision_tower" in name or "multi_modal_projector" in name}
    batch = collate([Row([5, 6, 7], [8, 9])], [0])
    response_log_probs(model, batch, temperature=1.0).sum().backward()
    assert all((p.grad is None) == (name in frozen) for name, p in model.named_parameters())


@pytest.mark.parametrize("name", ["llama", "bart", "rwkv", "mpt"])
def test_all_of_a_language_model_is_trained(name):
    model = family(name)
    freeze_other_senses(model)
    assert all(p.requires_grad for name, p in model.named_parameters() if "embed_positions" not in name)


def test_the_trial_leaves_nothing_behind():
    """What a model answers after it has the bytes of a model that was never tried."""
    tried, fresh = (TransformersGenerator(family("llama"), BUDGET, CONTEXT) for _ in range(2))
    tried.plan(requests())
    one = requests()[:1]
    assert tried.generate(one, Sampling()) == fresh.generate(one, Sampling())


# reward models


def reward_model(name: str, **settings: object) -> PreTrainedModel:
    """A classifier of weights that are large enough for their answers to differ."""
    torch.manual_seed(0)
    own = {"embedding_size": 32, "initializer_range": 0.5, "pad_token_id": 0, "num_labels": 1}
    described = AutoConfig.for_model(name, **{**settings_of("bert"), **own, **settings})
    return AutoModelForSequenceClassification.from_config(described).eval()


SCORED = {
    "bert": Batching.PADDED,
    "roberta": Batching.PADDED,
    "llama": Batching.PADDED,
    "bart": Batching.PADDED,
    **dict.fromkeys(("convbert", "fnet", "nystromformer", "yoso"), Batching.ONE_LENGTH),
}
AS_AN_ENCODER = {"is_decoder": False, "max_position_embeddings": CONTEXT + 2}
BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "init_std": 0.5, "is_encoder_decoder": True}


@pytest.mark.parametrize("name", SCORED)
def test_rows_have_the_scores_that_they_have_alone(name):
    model = reward_model(name, **(BART if name == "bart" else AS_AN_ENCODER))
    scorer = TransformersScorer(model, BUDGET)
    draw = torch.Generator().manual_seed(1)
    rows = [
        [*torch.randint(5, VOCABULARY, (length,), generator=draw).tolist(), 2] for length in (4, 17, 40, 4, 9)
    ]
    alone = [scorer.score([row])[0] for row in rows]
    assert max(alone) - min(alone) > 0.01
    assert scorer.score(rows) == pytest.approx(alone, rel=EXACT, abs=EXACT)
    assert scorer.batching() is SCORED[name]
    padded = scorer._score_batch(rows)
    is_exact = padded == pytest.approx(alone, rel=EXACT, abs=EXACT)
    assert is_exact == (SCORED[name] is Batching.PADDED)


def test_a_reward_model_without_an_id_of_padding_scores_row_by_row():
    model = reward_model("llama", pad_token_id=None)
    assert TransformersScorer(model, BUDGET).batching() is Batching.ALONE
