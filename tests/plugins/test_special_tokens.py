"""Tags that are special tokens of the policy's tokenizer: rules see them if they ask, and who does not ask
is warned."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pipeline.config.reward import OnError, RowsPerCall, RuleConfig, prefill_of
from pipeline.config.reward_rules import component_problems, special_token_warnings
from pipeline.data.checks import Judged
from pipeline.data.prompts import Prompt, Prompts
from pipeline.data.summary import prefill_warnings
from pipeline.data.tokenizer_files import read_tokenizer
from pipeline.run.schemas import reserved_columns
from stages.models.tokenizers import special_tokens
from stages.rewards.rows import texts_with_special_tokens
from stages.rewards.rules import rule_scores
from tests.support.processes import config_of
from tests.support.rollouts import rollout_table

WORDS = ["a", "b", "5", "<think>", "</think>", "<answer>", "</answer>", "<end>", "plain"]
TAGS = WORDS[3:7]
ENDS = frozenset({WORDS.index("<end>")})
PATTERN = "<think>.*</think>.*<answer>.*</answer>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """The tokenizer of a policy that has learnt to think between special tokens."""
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="plain"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(TAGS)
    folder = tmp_path_factory.mktemp("tags")
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def rollout(tokenizer, texts: list[str], finish_reason: str = "stop", prompt: str = "q"):
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return rollout_table(
        ids,
        response_text=[tokenizer.decode(one, skip_special_tokens=True) for one in ids],
        finish_reason=[finish_reason] * len(ids),
        prompt_text=[prompt] * len(ids),
    )


def test_the_text_with_special_tokens_is_that_of_the_ids_without_the_end(tokenizer):
    rows = rollout(tokenizer, ["<think> a </think> <answer> 5 </answer> <end>", "a <end>", "<end>", "b"])
    assert texts_with_special_tokens(tokenizer, rows, ENDS) == [
        "<think> a </think> <answer> 5 </answer>",
        "a",
        "",
        "b",
    ]
    cut = rollout(tokenizer, ["a </think>"], finish_reason="length")
    assert texts_with_special_tokens(tokenizer, cut, ENDS) == ["a </think>"]


def test_a_format_finds_its_tags_where_the_rule_asks_for_special_tokens(tokenizer):
    rows = rollout(tokenizer, ["<think> a </think> <answer> 5 </answer> <end>", "a 5 <end>"])
    special = texts_with_special_tokens(tokenizer, rows, ENDS)
    blind = RuleConfig(function="regex_match", arguments={"pattern": PATTERN})
    assert rule_scores("format", blind, rows)[0] == [0.0, 0.0]
    seeing = RuleConfig(function="regex_match", arguments={"pattern": PATTERN}, special_tokens=True)
    assert rule_scores("format", seeing, rows, special)[0] == [1.0, 0.0]


def test_a_rule_of_the_users_own_gets_both_texts(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "both_texts.py").write_text(
        "def f(*, responses, plain_responses, **columns):\n"
        "    return [len(r) - len(p) for r, p in zip(responses, plain_responses)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = rollout(tokenizer, ["<think> a </think>", "a b"], finish_reason="length")
    rule = RuleConfig(function="both_texts:f", special_tokens=True)
    found = rule_scores("mine", rule, rows, texts_with_special_tokens(tokenizer, rows, ENDS))[0]
    assert found == [float(len("<think>  </think>")), 0.0]


def test_what_the_prompt_begins_is_part_of_the_response_where_the_rule_asks_for_it(tokenizer):
    rows = rollout(tokenizer, ["a </think> <answer> 5 </answer> <end>"], prompt="q assistant <think>\n")
    special = texts_with_special_tokens(tokenizer, rows, ENDS)
    given = {"function": "regex_match", "arguments": {"pattern": PATTERN}, "special_tokens": True}
    assert rule_scores("format", RuleConfig(**given), rows, special)[0] == [0.0]
    assert rule_scores("format", RuleConfig(**given, prefill="<think>"), rows, special)[0] == [1.0]


@pytest.mark.parametrize(
    ("prompt", "prefill", "found"),
    [
        ("q <think>\n", "<think>", "<think>\n"),
        ("q <think>", "<think>\n", "<think>"),
        ("q <think> no", "<think>", ""),
        ("", "<think>", ""),
        ("q <think>", None, ""),
    ],
)
def test_a_prefill_is_what_the_prompt_ends_with(prompt, prefill, found):
    assert prefill_of(prompt, RuleConfig(function="m:f", prefill=prefill)) == found


def configured(inputs, tmp_path, **settings):
    """A run's configuration with one rule more."""
    config = config_of(inputs, tmp_path / "run")
    rule = RuleConfig(function="regex_match", **settings)
    components = {**config.reward.components, "format": rule}
    return replace(config, reward=replace(config.reward, components=components))


def test_validate_and_prepare_warn_of_words_that_rules_do_not_see(inputs, tmp_path, directory, tokenizer):
    arguments = {"pattern": PATTERN}
    blind = configured(inputs, tmp_path, arguments=arguments)
    for special in (read_tokenizer(directory).special, special_tokens(tokenizer)):
        assert {*TAGS, "<end>"} <= special
        [warning] = special_token_warnings(blind, special)
        assert warning.startswith(
            "warning: reward.components.format.arguments.pattern: </answer>, </think>, <"
        )
        assert warning.endswith("set reward.components.format.special_tokens=true")
    seeing = configured(inputs, tmp_path, arguments=arguments, special_tokens=True)
    assert list(special_token_warnings(seeing, special)) == []
    assert list(special_token_warnings(blind, frozenset({"<end>"}))) == []
    escaped = configured(inputs, tmp_path, arguments={"pattern": r"<\|think\|>.*"})
    assert len(list(special_token_warnings(escaped, {"<|think|>"}))) == 1


def test_validate_warns_of_prompts_that_do_not_end_as_the_rule_expects(inputs, tmp_path):
    config = configured(inputs, tmp_path, prefill="<think>")
    texts = ["q <think>\n", "q"]
    rows = tuple(Prompt(i, str(i), text, f"line {i + 1}") for i, text in enumerate(texts))
    judged = Judged("data.prompts", "p", Prompts(rows, None, (), 2), (0, 1), (), texts, [[1], [1]])
    [warning] = prefill_warnings(judged, config)
    assert "1 of 2 prompts do not end with reward.components.format.prefill='<think>', as line 2" in warning


@pytest.mark.parametrize(
    ("settings", "key", "why"),
    [
        ({"prefill": " \n"}, "prefill", "is blank"),
        (
            {"special_tokens": True, "arguments": {"plain_responses": 1}},
            "arguments.plain_responses",
            "itself",
        ),
        (
            {"error_score": -1.0},
            "error_score",
            "on_error=score, and that is stop; set that too, or leave this out",
        ),
        ({"max_failed": 0.5}, "max_failed", "on_error=score, and that is stop"),
        ({"on_error": OnError.SCORE, "rows_per_call": RowsPerCall.PROMPT}, "on_error", "all responses of a"),
    ],
)
def test_settings_of_a_rule_that_do_not_go_together_are_named(inputs, tmp_path, settings, key, why):
    [found] = component_problems(configured(inputs, tmp_path, **settings))
    assert f"reward.components.format.{key}" in str(found)
    assert why in str(found)


def test_a_column_may_have_the_name_of_the_plain_text_where_no_rule_gets_that(inputs, tmp_path):
    assert "plain_responses" not in reserved_columns(configured(inputs, tmp_path))
    assert "plain_responses" in reserved_columns(configured(inputs, tmp_path, special_tokens=True))
