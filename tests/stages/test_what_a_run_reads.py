"""What is scored and trained is what was generated: ids, texts and numbers, in all who read a rollout."""

import dataclasses
import json

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from pipeline.config.model_rules import model_problems
from pipeline.run.schemas import GREEDY_SAMPLE, FinishReason
from pipeline.run.tasks import PREPARE
from stages.context import Context
from stages.engines.base import BadAnswer
from stages.generation.episodes import Episode
from stages.generation.responding import check_known
from stages.models.hidden import hide_unknown_ids
from stages.models.loading import load_causal_lm
from stages.ppo.batching import Row, collate
from stages.ppo.experience import build_experience
from stages.ppo.forward import policy_outputs
from stages.ppo.targets import TargetScores, estimate
from stages.rewards.components import component_scores
from stages.tasks.evaluate import Sampled, evaluation_numbers
from stages.tasks.reward import reward_table, validity_metrics
from tests.support import tiny
from tests.support.composed import composed_of
from tests.support.processes import make_run
from tests.support.rollouts import reward_table as reward_table_of
from tests.support.rollouts import rollout_table
from tests.support.scoring import TEXTS, context, responses

pytestmark = pytest.mark.usefixtures("one_thread")


# ids that no token has


@pytest.fixture
def padded(models, tmp_path):
    """A policy whose embeddings were padded to a round number, as for speed on GPUs; the likeliest ids are
    those of the padding."""
    model = AutoModelForCausalLM.from_pretrained(models / "policy")
    model.resize_token_embeddings(320, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[258:] = 3 * model.lm_head.weight[torch.arange(62) + 30]
    model.save_pretrained(tmp_path / "policy")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "policy" / name).write_bytes((models / "policy" / name).read_bytes())
    return tmp_path / "policy"


def context_of(models, padded, folder, *more: str) -> Context:
    run = make_run(models, folder / "run", f"model.policy={padded}", *more)
    return Context(run.paths, run.config, PREPARE, "test")


def test_ids_that_no_token_has_have_no_probability_and_no_gradient(models, padded, tmp_path):
    config = context_of(models, padded, tmp_path).config
    model = hide_unknown_ids(load_causal_lm(padded, config.update.precision, False), config).float()
    batch = collate([Row([70, 71], [72, 73, 74])], [0])
    outputs = policy_outputs(model, batch, 0.7, entropy=True, entropy_grad=True)
    with torch.no_grad():
        plain = load_causal_lm(padded, config.update.precision, False).float()
        logits = plain(torch.tensor([[70, 71, 72, 73, 74]])).logits[0, 1:4, :258] / 0.7
    known = torch.log_softmax(logits, dim=-1)
    expected = known.gather(1, torch.tensor([[72], [73], [74]]))[:, 0]
    assert torch.allclose(outputs.log_probs[0], expected, atol=1e-5)
    assert torch.allclose(outputs.entropy[0], -(known.exp() * known).sum(-1), atol=1e-4)
    (outputs.log_probs.sum() + 0.1 * outputs.entropy.sum()).backward()
    head = model.lm_head.weight.grad
    assert head[258:].abs().max() == 0
    assert head[:258].isfinite().all()
    assert head[:258].abs().max() > 0


def test_an_engine_of_the_users_that_writes_such_an_id_is_named(models, padded, tmp_path):
    made = context_of(models, padded, tmp_path)
    rows = responses(models, TEXTS)
    written = [Episode([70, 300], [True] * 2, [-1.0] * 2, FinishReason.LENGTH, 1)] * 3
    with pytest.raises(BadAnswer, match=r"wrote id 300, which the policy's tokenizer has no token for.* p0"):
        check_known(made, written, rows)
    check_known(made, [dataclasses.replace(one, tokens=[70, 257]) for one in written], rows)


def test_a_reward_model_that_pads_with_an_id_it_does_not_have_is_refused(models, tmp_path):
    judge = tiny.make_reward_model(tmp_path / "judge")
    described = json.loads((judge / "config.json").read_text()) | {"pad_token_id": 259}
    (judge / "config.json").write_text(json.dumps(described))
    config = composed_of(models, tmp_path / "run", f"reward.components.rm.path={judge}")
    (problem,) = model_problems(config)
    assert "pad_token_id=259, which is none of its 259 embeddings" in str(problem)


# responses that a reward model cannot take


def few_embeddings(models, folder) -> str:
    """A reward model whose tokenizer has got tokens since, for which it has no embedding."""
    judge = tiny.make_reward_model(folder / "judge")
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    model.resize_token_embeddings(225, mean_resizing=False)
    model.save_pretrained(judge)
    return str(judge)


def test_a_response_that_a_reward_model_cannot_take_has_no_score(models, tmp_path):
    """It was 0: the best of all where a reward model's scores are below."""
    rows = responses(models, [*TEXTS[:2], ("q", "ā")])  # a byte of it stands last in the vocabulary
    made = context(models, tmp_path)
    model = few_embeddings(models, tmp_path)
    component = dataclasses.replace(made.config.reward.components["rm"], path=model)
    scores, metrics = component_scores(made, rows, {"rm": component})
    assert [score is None for score in scores["rm"]] == [False, False, True]
    assert metrics["unscored/rm"] == 1.0
    total = reward_table(made.config, rows, scores, None)["reward"].to_pylist()
    assert total == pytest.approx([*scores["rm"][:2], None])


def scored(rewards: list[float | None], samples: list[int], prompt_id: str = "p") -> tuple:
    """Responses to one prompt, and their reward table."""
    count = len(rewards)
    rollout = rollout_table([[7, 8]] * count, prompt_id=[prompt_id] * count, sample_index=samples)
    return rollout, reward_table_of(rollout, rewards)


def test_the_update_leaves_it_out_and_compares_no_other_with_it():
    rollout, rewards = scored([-6.0, None, -8.0], [0, 1, 2])
    found = build_experience(rollout, rewards, [4, 5, 6])
    assert found.outcome.scores.tolist() == [-6.0, -8.0]
    assert found.groups.tolist() == [0, 0]
    assert list(found.shards) == [4, 6]
    assert found.mask.shape == (2, 2)
    assert validity_metrics(rewards) == {"unscored": 1.0, "validity/unscorable": 1.0, "validity/scored": 2.0}


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce++-baseline"])
def test_the_last_of_a_group_has_nothing_to_be_compared_with(models, tmp_path, estimator):
    """Its raw score, of any mean, would teach it to go away, or to stay."""
    given = [f"algorithm.estimator={estimator}", "algorithm.kl.coef=0", "rollout.samples_per_prompt=2"]
    config = context(models, tmp_path, *given).config
    tables = [scored([-6.0, None], [0, 1]), scored([-7.0, -9.0], [0, 1], "q")]
    rollout, rewards = (pa.concat_tables(found) for found in zip(*tables, strict=True))
    found = build_experience(rollout, rewards, [0] * 4)
    rewarded = torch.zeros(3, 2)
    rewarded[:, 1] = found.outcome.scores
    scores = TargetScores(found.outcome.scores, None)
    advantages, _ = estimate(config, found, rewarded, scores, None)
    assert advantages[0].tolist() == [0.0, 0.0]
    assert advantages[1, 0] > 0 > advantages[2, 0]


def test_without_a_score_of_the_greedy_response_remax_has_nothing_to_compare_with():
    rollout, rewards = scored([-6.0, -7.0, None], [0, 1, GREEDY_SAMPLE])
    assert len(build_experience(rollout, rewards, [0, 0, 0])) == 0
    assert validity_metrics(rewards) == {"unscored": 2.0, "validity/no_baseline": 2.0, "validity/scored": 0.0}


def test_an_evaluation_counts_it_in_no_mean_and_as_not_solved():
    numbers = evaluation_numbers({"reward": [1.0, None, 0.0, 1.0]}, [], Sampled(2, [1]))
    assert numbers["evaluate/reward"] == pytest.approx(2 / 3)
    assert numbers["evaluate/pass@1"] == pytest.approx(0.5)


# long inputs of reward models


def test_an_encoder_keeps_its_first_token_when_its_input_is_cut(models, tmp_path):
    """Its score is read off [CLS]."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    judge = tiny.make_reward_model(tmp_path / "judge", specials=("<eos>", "<cls>", "<pad>"))
    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "<cls>:0 $A:0 <eos>:0", None, [("<cls>", 1), ("<eos>", 0)]
    )
    tokenizer.save_pretrained(judge)
    made = context(models, tmp_path, f"reward.components.rm.path={judge}")
    scores, metrics = component_scores(made, responses(models, [("p" * 60, "an answer")]))
    letters = tokenizer("p" * 60 + "an answer", add_special_tokens=False)["input_ids"]
    kept = [1, *letters[-(tiny.CONTEXT - 2) :], 0]
    model = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    with torch.no_grad():
        expected = float(model(input_ids=torch.tensor([kept])).logits[0, 0])
    assert scores["rm"] == pytest.approx([expected], abs=1e-5)
    assert metrics == {"truncated/rm": 1.0, "unscored/rm": 0.0}
