"""Process reward models: a score for each step, at the policy's token that ends it, beside a plain pass."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

from pipeline.config.issue import ConfigError
from pipeline.config.reward import ModelSteps
from pipeline.config.rules import contradictions
from pipeline.run.schemas import STEP_REWARDS
from stages.context import UserError
from stages.engines import release_all
from stages.ppo.experience import build_experience
from stages.rewards.components import component_scores
from stages.rewards.step_models import marked, text_steps, unmarked
from stages.rewards.steps import scores_in
from stages.tasks.reward import reward_table
from stages.tasks.score import score_table
from stages.trials.models import loading_problems, tokenizer_problems
from tests.support import tiny
from tests.support.processes import config_of
from tests.support.scoring import context, responses

pytestmark = pytest.mark.usefixtures("one_thread")
SHARED = ("<pad>", "<eos>")
"""Special tokens of the policy's tokenizer: a model with these reads the policy's ids."""
OTHER = ("<eos>", "<x>", "<pad>")
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
MESSAGES = json.dumps([{"role": "user", "content": "hi"}])
KEY = "reward.components.rm"
ANSWERS = ["One.\n\nTwo.\n\nrest", "no end", "\n\n \n\na\n\n", "", "Ü.\n\nx", "a\n\nb\n\n\n"]
STEPS = [[6, 12, 16], [6], [8], [0], [4, 5], [3, 6]]
"""Characters up to the end of each answer's steps; the number of all where none ends it."""


@pytest.fixture(autouse=True)
def no_engine_stays():
    yield
    release_all()


def model_in(folder: Path, kind=LlamaForSequenceClassification, specials=SHARED, added=(), **others) -> Path:
    """A reward model whose tokenizer has some more tokens."""
    torch.manual_seed(3)
    tokenizer = tiny.byte_tokenizer(specials, others.pop("chat_template", None))
    tokenizer.add_tokens(list(added))
    kind(
        tiny.llama_config(tokenizer, **{"num_labels": 1, "initializer_range": 0.1} | others)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scored(models: Path, folder: Path, model: Path, rows, *more: str, steps="separator"):
    """The scores of a component with steps, and metrics."""
    words = (f"{KEY}.path={model}", f"{KEY}.steps={steps}", "algorithm.kl.coef=0", *more)
    given = context(models, folder, *words)
    scores, metrics = component_scores(given, rows)
    return scores["rm"], metrics, given.config


def plain(model: Path, ids: list[int]) -> float:
    """What the model gives a whole sequence."""
    loaded = AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.no_grad():
        return float(loaded(input_ids=torch.tensor([ids])).logits[0, 0])


def prefixes(rows, model: Path, row: int, ends: list[int]) -> list[float]:
    """What the model gives a row's own ids up to each of its tokens."""
    prompt, response = rows["prompt_tokens"][row].as_py(), rows["response_tokens"][row].as_py()
    return [plain(model, prompt + response[: end + 1]) for end in ends]


def places(score) -> dict[int, float]:
    return {index: value for index, value in enumerate(score.steps) if value is not None}


def test_the_steps_of_a_response_are_scored_where_their_separators_end(models, tmp_path):
    """One token a byte, and one that ends the response, which ends what no separator does."""
    model = model_in(tmp_path / "model")
    rows = responses(models, [(f"p{i}", text) for i, text in enumerate(ANSWERS)])
    scores, metrics, config = scored(models, tmp_path, model, rows, f"{KEY}.weight=2")
    assert metrics == {"truncated/rm": 0, "unscored/rm": 0}
    for row, (text, characters) in enumerate(zip(ANSWERS, STEPS, strict=True)):
        length = len(rows["response_tokens"][row])
        is_last_open = not text[: characters[-1]].endswith("\n\n")
        ends = [len(text[:end].encode()) - 1 for end in characters]
        ends = [*ends[:-1], length - 1] if is_last_open else ends
        expected = prefixes(rows, model, row, ends)
        assert list(places(scores[row])) == ends
        assert list(places(scores[row]).values()) == pytest.approx(expected, abs=1e-6)
        assert scores[row] == pytest.approx(sum(expected), abs=1e-5)
    table = reward_table(config, rows, {"rm": scores}, None)
    learnt = build_experience(rows, table, [0] * len(ANSWERS)).step_rewards
    assert learnt.nan_to_num().sum(dim=1).tolist() == pytest.approx([2 * one for one in scores], abs=1e-5)
    assert table[STEP_REWARDS].to_pylist()[1][-1] == pytest.approx(2 * scores[1], abs=1e-6)
    of_pool = scores_in(score_table(rows, {"rm": scores}, {}, ["rm"]), "rm")
    assert [one.steps for one in of_pool] == [one.steps for one in scores]


def test_scores_depend_neither_on_the_batch_nor_on_the_shard(models, tmp_path):
    model = model_in(tmp_path / "model")
    rows = responses(models, [(f"p{i}", text) for i, text in enumerate(ANSWERS)])
    found = []
    for number, budget in enumerate((16, 48, 4096)):
        folder, words = tmp_path / str(number), (f"reward.tokens_per_batch={budget}",)
        found.append(scored(models, folder, model, rows, *words)[0])
    parts = [scored(models, tmp_path / f"s{i}", model, rows.slice(3 * i, 3))[0] for i in range(2)]
    for other in (*found[1:], parts[0] + parts[1]):
        for one, two in zip(found[0], other, strict=True):
            assert places(one) == pytest.approx(places(two), abs=1e-6)


def test_a_separator_in_one_token_with_its_neighbours_ends_in_that_token(models, tmp_path):
    merged = [".\n\nT", "\n\n\n\n"]
    folder = tmp_path / "inputs"
    model_in(folder / "policy", LlamaForCausalLM, added=merged)
    model = model_in(folder / "reward_model", added=merged)
    tiny.write_prompts(folder)
    rows = responses(folder, [("p", "One.\n\nTwo\n\n\n\nx")])
    ids = rows["response_tokens"][0].as_py()
    tokens = AutoTokenizer.from_pretrained(model).convert_ids_to_tokens(ids)
    assert tokens[3] == merged[0]
    scores, *_ = scored(folder, tmp_path, model, rows)
    ends = [3, tokens.index(merged[1]), len(ids) - 1]
    expected = prefixes(rows, model, 0, ends)
    assert places(scores[0]) == pytest.approx(dict(zip(ends, expected, strict=True)), abs=1e-6)


# a tokenizer and a template of its own


def test_a_step_token_stands_in_place_of_separators_in_what_the_model_reads(models, tmp_path):
    """By Qwen2.5-Math-PRM's convention; the scores lie at the policy's tokens."""
    model = model_in(
        tmp_path / "model",
        LlamaForTokenClassification,
        OTHER,
        ["<step>"],
        chat_template=TEMPLATE,
        num_labels=2,
    )
    words = (f"{KEY}.step_token='<step>'", f"{KEY}.step_score=probability")
    answers = [("say", "One.\n\nTwo.\n\nrest"), ("say", "\n\nOne <step>.\n\n"), ("say", "Ü")]
    rows = responses(models, answers, [MESSAGES] * 3)
    scores, *_ = scored(models, tmp_path, model, rows, *words)
    tokenizer, loaded = (
        AutoTokenizer.from_pretrained(model),
        AutoModelForTokenClassification.from_pretrained(model).eval(),
    )
    read = ["One.<step>Two.<step>rest<step>", "One <step>.<step>", "Ü<step>"]
    ends = [[5, 11, 16], [14], [2]]
    for row, text in enumerate(read):
        ids = tokenizer(f"[user]hi[assistant]{text}", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            right = loaded(input_ids=torch.tensor([ids])).logits[0].softmax(dim=-1)[:, 1]
        at = [i for i, one in enumerate(ids) if one == tokenizer.convert_tokens_to_ids("<step>")]
        expected = right[at[-len(ends[row]) :]].tolist()  # what the policy wrote itself ends no step
        assert places(scores[row]) == pytest.approx(dict(zip(ends[row], expected, strict=True)), abs=1e-6)


def test_separators_are_found_again_in_the_models_own_text(models, tmp_path):
    """Its template strips the last one; the step then ends with what it says."""
    model = model_in(tmp_path / "model", specials=OTHER, chat_template=TEMPLATE)
    rows = responses(models, [("say", "One. \n\nTwo.\n\n"), ("say", "no end")], [MESSAGES] * 2)
    scores, *_ = scored(models, tmp_path, model, rows)
    tokenizer = AutoTokenizer.from_pretrained(model)
    begin = "[user]hi[assistant]"
    read = [[f"{begin}One. \n\n", f"{begin}One. \n\nTwo."], [f"{begin}no end"]]
    for row, texts in enumerate(read):
        expected = [plain(model, tokenizer(text)["input_ids"]) for text in texts]
        assert list(places(scores[row]).values()) == pytest.approx(expected, abs=1e-6)
    assert list(places(scores[0])) == [6, 12]


SAID = [
    {"role": "assistant", "content": "ab"},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "c"},
]


@pytest.mark.parametrize("specials", [SHARED, OTHER], ids=["the policy's ids", "its own"])
def test_a_turn_has_the_score_of_the_conversation_up_to_it(models, tmp_path, specials):
    own = TEMPLATE if specials is OTHER else None
    model = model_in(tmp_path / "model", specials=specials, chat_template=own)
    mask = [True, True, True, False, False, True, True]
    rows = responses(models, [("say", "ab??c?")], [MESSAGES], [json.dumps(SAID)], response_mask=[mask])
    scores, *_ = scored(models, tmp_path, model, rows, steps="turns")
    expected = prefixes(rows, model, 0, [2, 6])
    if own:
        tokenizer, first = AutoTokenizer.from_pretrained(model), "[user]hi[assistant]ab"
        texts = [first, f"{first}[tool]42[assistant]c"]
        expected = [plain(model, tokenizer(text)["input_ids"]) for text in texts]
    assert places(scores[0]) == pytest.approx(dict(zip([2, 6], expected, strict=True)), abs=1e-6)


def test_a_template_that_writes_turns_otherwise_once_others_follow_is_refused(models, tmp_path):
    template = TEMPLATE.replace("{{ m.content | trim }}", "{{ m.content if loop.last else '...' }}")
    model = model_in(tmp_path / "model", specials=OTHER, chat_template=template)
    mask = [True, True, True, False, False, True, True]
    rows = responses(models, [("say", "ab??c?")], [MESSAGES], [json.dumps(SAID)], response_mask=[mask])
    with pytest.raises(UserError, match=r"prompt_id p0, sample 0: its chat template writes turn 1 otherwise"):
        scored(models, tmp_path, model, rows, steps="turns")


# what does not fit, and what is not read


def test_a_response_whose_first_step_its_context_cuts_off_is_left_out(models, tmp_path):
    """The prompt may be cut."""
    model = model_in(tmp_path / "model")
    long, short = "a\n\n" + "b" * 70, "a\n\nb"
    rows = responses(models, [("p", long), ("p" * 70, short), ("p", short)])
    scores, metrics, _ = scored(models, tmp_path, model, rows, f"{KEY}.normalization={{mean: 1, std: 2}}")
    assert scores[0] is None
    assert metrics == {"truncated/rm": 2, "unscored/rm": 1}
    ids = rows["prompt_tokens"][1].as_py() + rows["response_tokens"][1].as_py()
    cut = ids[-tiny.CONTEXT :]
    assert places(scores[1]) == pytest.approx(
        {2: (plain(model, cut[:-2]) - 1) / 2, 4: (plain(model, cut) - 1) / 2}, abs=1e-6
    )


def test_a_response_whose_steps_its_template_does_not_write_is_left_out_and_not_the_run(models, tmp_path):
    """A policy may write anything, once in a thousand iterations too."""
    template = TEMPLATE.replace("m.content | trim", "m.content.split('</think>')[-1] | trim")
    model = model_in(tmp_path / "model", specials=OTHER, chat_template=template)
    odd = "One.\n\nTwo.\n\n</think>Three.\n\n"
    rows = responses(models, [("say", odd), ("say", "One.\n\nTwo")], [MESSAGES] * 2)
    scores, metrics, _ = scored(models, tmp_path, model, rows)
    assert scores[0] is None
    assert list(places(scores[1])) == [5, 9]
    assert metrics == {"truncated/rm": 0, "unscored/rm": 1}
    of_all = r"prompt_id p0, sample 0: its chat template writes 1 of 3 steps; change its template, or leave"
    with pytest.raises(UserError, match=of_all):
        scored(models, tmp_path / "alone", model, rows.slice(0, 1))


CODE = """
from torch import nn
from transformers import LlamaModel, LlamaPreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput

class LlamaForProcessRewardModel(LlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, **others):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return TokenClassifierOutput(logits=self.score(hidden))
"""


def test_a_model_of_code_of_its_own_is_loaded_once_it_is_trusted(models, tmp_path, monkeypatch):
    """As Qwen2.5-Math-PRM is: its auto_map has AutoModel alone."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = model_in(tmp_path / "model", num_labels=2)
    (model / "own.py").write_text(CODE)
    names: dict = {}
    exec(CODE, names)
    made = names["LlamaForProcessRewardModel"](
        tiny.llama_config(AutoTokenizer.from_pretrained(model), num_labels=2)
    ).eval()
    made.save_pretrained(model)
    settings = json.loads((model / "config.json").read_text())
    code = {"auto_map": {"AutoModel": "own.LlamaForProcessRewardModel"}}
    (model / "config.json").write_text(json.dumps(settings | code))
    rows = responses(models, [("p", "a\n\nb")])
    probability = f"{KEY}.step_score=probability"
    with pytest.raises(
        ConfigError, match=r"Python code from its directory; if you trust it, set model.trust"
    ):
        scored(models, tmp_path, model, rows, probability)
    trust = "model.trust_remote_code=true"
    scores, _, config = scored(models, tmp_path / "trusted", model, rows, probability, trust)
    ids = rows["prompt_tokens"][0].as_py() + rows["response_tokens"][0].as_py()
    with torch.no_grad():
        right = made(input_ids=torch.tensor([ids])).logits[0].softmax(dim=-1)[:, 1]
    assert places(scores[0]) == pytest.approx({2: float(right[3]), 4: float(right[5])}, abs=1e-6)
    assert not list(loading_problems(config))


def test_a_step_token_of_several_tokens_and_separators_of_conversations_are_refused(models, tmp_path):
    words = (f"{KEY}.steps=separator", f"{KEY}.step_token='<step>'")
    config = config_of(models, tmp_path / "run", *words)
    (problem,) = map(str, tokenizer_problems(config))
    assert problem.startswith(
        f"{KEY}.step_token=<step>: is 6 tokens to the reward model's tokenizer; give one"
    )
    turns = config_of(models, tmp_path / "other", "rollout.multi_turn={scheduler: 'a:b'}")
    component = dataclasses.replace(config.reward.components["rm"], steps=ModelSteps.SEPARATOR)
    reward = dataclasses.replace(turns.reward, components={"rm": component})
    lines = map(str, contradictions(dataclasses.replace(turns, reward=reward)))
    assert any(
        f"{KEY}.steps=separator: a conversation is no single text; set it to turns" in one for one in lines
    )


def test_a_tokenizer_that_does_not_tell_where_tokens_lie_is_found_before_a_run(models, tmp_path, monkeypatch):
    model = model_in(tmp_path / "model", specials=OTHER)
    config = config_of(models, tmp_path / "run", f"{KEY}.path={model}", f"{KEY}.steps=separator")
    assert not list(tokenizer_problems(config))
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    (problem,) = map(str, tokenizer_problems(config))
    assert problem.startswith(f"{model}: its tokenizer does not say where tokens lie in a text")


@pytest.mark.parametrize("token", [None, "#"])
@pytest.mark.parametrize("text", [*ANSWERS, "a \n\n\n\n b \n\n c ", "\n\n\n"])
def test_marks_leave_the_text_as_it_was(text, token):
    steps = text_steps(text, "\n\n")
    marks = [step for step in steps if token or step.stop is not None]
    behind = [token or text[len(text[: step.end].rstrip()) : step.stop] for step in marks]
    found, ends = unmarked(marked(text, steps, "|", token), "|", behind)
    assert len(ends) == len(marks)
    if token:
        assert found == "".join(text[step.start : step.end] + token for step in steps)
    else:
        assert (found, ends) == (text, [step.stop for step in marks])
    with pytest.raises(ValueError, match="writes 0 of"):
        unmarked("x", "|", ["", *behind])
