"""A prompt's ids and a response's text with tokenizers of every kind: nothing twice, nothing lost."""

import functools
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline.data.tokenizer_files import read_tokenizer
from pipeline.data.tokens import (
    Affixes,
    Ends,
    affixes_of,
    end_warnings,
    ends_of,
    hidden_ids,
    template_end,
    text_ids,
    written_text,
)
from stages.models.tokenizers import same_tokenizer
from stages.rewards.rows import token_ids
from tests.support.forty_tokenizers import CASES, KINDS, LETTERS, VARIANTS, Variant, save_tokenizer

MESSAGES = [{"role": "user", "content": "what is it"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, (kind, variant) in CASES.items():
        save_tokenizer(folder / name, kind, variant)
        (folder / name / "config.json").write_text("{}")
    return folder


@pytest.fixture(params=CASES)
def case(request, folders) -> tuple[Path, Variant]:
    return folders / request.param, CASES[request.param][1]


@functools.cache
def loaded(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def prompt_ids(tokenizer, text: str) -> list[int]:
    return text_ids(tokenizer, [text], special=True, ends=False, affixes=affixes_of(tokenizer))[0]


def words(seed: int) -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices(LETTERS, k=draw.randint(1, 6))) for _ in range(draw.randint(1, 8)))


def test_a_prompt_of_text_begins_once_and_never_ends(case):
    """validate, which has tokenizer.json alone, and tasks, which have transformers', agree to the id."""
    folder, variant = case
    tokenizer, of_files = loaded(folder), read_tokenizer(folder)
    begin = [tokenizer.convert_tokens_to_ids("<s>")] if variant.adds_begin else []
    for seed in range(3):
        text = words(seed)
        bare = tokenizer([text], add_special_tokens=False)["input_ids"][0]
        assert prompt_ids(tokenizer, text) == prompt_ids(of_files, text) == begin + bare
        if variant.begin:
            written = prompt_ids(tokenizer, f"<s>{text}")
            assert written[:1] == [tokenizer.bos_token_id]
            assert written.count(tokenizer.bos_token_id) == 1
    assert affixes_of(tokenizer) == affixes_of(of_files)


def test_a_text_that_is_read_whole_is_as_the_tokenizer_makes_it(case):
    """As an encoder's reward model was trained, with [CLS] and [SEP]; but begun or ended once."""
    folder, variant = case
    tokenizer = loaded(folder)
    text = words(1)
    assert token_ids(tokenizer, text, special=True) == tokenizer([text])["input_ids"][0]
    if variant.adds_begin and variant.adds_end:
        written = token_ids(tokenizer, f"<s>{text}</s>", special=True)
        assert [written.count(tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")] == [1, 1]


def test_what_is_too_long_keeps_its_begin_and_its_end(case):
    folder, variant = case
    tokenizer, text = loaded(folder), words(2)
    affixes, ids = affixes_of(tokenizer), token_ids(tokenizer, text, special=True)
    for limit in range(1, len(ids) + 2):
        cut = affixes.cut(ids, limit)
        assert len(cut) == min(limit, len(ids))
        if limit > len(affixes.before):
            assert cut[: len(affixes.before)] == list(affixes.before)
        assert cut[-1] == ids[-1]
    if variant.template and variant.template.startswith("<s>"):
        rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        chat = tokenizer([rendered], add_special_tokens=False)["input_ids"][0]
        assert affixes.cut(chat, 5) == [tokenizer.bos_token_id, *chat[-4:]]


def test_the_token_that_ended_a_response_is_no_part_of_its_text(case):
    """Also where the tokenizer does not call it special, and in each turn of a conversation."""
    folder, variant = case
    tokenizer = loaded(folder)
    ends = ends_of(folder, tokenizer)
    said = tokenizer([words(3)], add_special_tokens=False)["input_ids"][0]
    plain = tokenizer.decode(said, skip_special_tokens=True)
    for end in ends.ids:
        assert written_text(tokenizer, [*said, end], [True] * (len(said) + 1), ends.unwritten) == plain
        twice = [*said, end, *said, end]
        both = tokenizer.decode([*said, *said], skip_special_tokens=True)
        assert written_text(tokenizer, twice, [True] * len(twice), ends.unwritten) == both
    expected = {"</s>"} & ({tokenizer.eos_token} if variant.end else set())
    expected |= {"<over>"} if variant.template else set()
    assert {tokenizer.convert_ids_to_tokens(i) for i in ends.ids} == expected


def test_validate_and_tasks_find_the_same_ends(case):
    folder, _ = case
    tokenizer, of_files = loaded(folder), read_tokenizer(folder)
    assert template_end(tokenizer) == template_end(of_files)
    assert tokenizer.eos_token_id == of_files.eos_token_id


def test_settings_of_the_last_call_make_no_other_tokenizer(case):
    """Padding and truncation of a call stay in the tokenizer, and in tokenizer.json if it is saved then."""
    folder, _ = case
    one, other = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if other.pad_token is not None:
        other(["a b", "c"], padding="max_length", max_length=9, truncation=True, padding_side="left")
    assert same_tokenizer(one, other)
    other.add_tokens(["<another>"])
    assert not same_tokenizer(one, other)


def test_tokenizers_of_different_vocabularies_are_never_the_same(folders):
    made = [AutoTokenizer.from_pretrained(folders / f"{kind}-0") for kind in KINDS]
    assert [[same_tokenizer(one, other) for other in made] for one in made] == [
        [i == j for j in range(len(made))] for i in range(len(made))
    ]


def test_ids_without_a_token_are_those_beyond_the_tokenizer(case):
    folder, _ = case
    tokenizer = loaded(folder)
    assert hidden_ids(tokenizer, len(tokenizer) + 3) == [len(tokenizer) + i for i in range(3)]
    assert hidden_ids(tokenizer, len(tokenizer)) == []
    assert hidden_ids(object(), 10) == []  # a tokenizer of the user's that does not say


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    ids=st.lists(st.integers(0, 5), max_size=9),
    before=st.lists(st.integers(0, 5), max_size=2),
    after=st.lists(st.integers(0, 5), max_size=2),
    limit=st.integers(1, 12),
)
def test_affixes_are_put_once_and_cuts_stay_within_the_limit(ids, before, after, limit):
    affixes = Affixes(tuple(before), tuple(after))
    once = affixes.around(ids, ends=True)
    assert affixes.around(once, ends=True) == once
    cut = affixes.cut(once, limit)
    assert len(cut) == min(limit, len(once))
    assert cut == once or limit <= len(before) or cut[: len(before)] == before


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        (
            Ends(frozenset({0}), 1, None),
            "end token \\(1 'a'\\) is none of .* \\(0 'b'\\); responses end at any",
        ),
        (Ends(frozenset({0}), 0, 1), "end of a turn in its chat template \\(1 'a'\\)"),
        (Ends(frozenset({1}), 1, None, frozenset({7})), "cannot end at 7, which is no token's id"),
        (Ends(frozenset(), None, None), "neither the model nor its tokenizer .*give rollout.stop_token_ids"),
    ],
)
def test_validate_says_what_ends_a_response_where_model_and_tokenizer_disagree(ends, says):
    class Tokenizer:
        def decode(self, ids):
            return "ba"[ids[0]]

        def get_vocab(self):
            return {"b": 0, "a": 1}

    (line,) = end_warnings(ends, Tokenizer(), "policy")
    assert line.startswith("warning: model.policy=policy: ")
    assert re.search(says, line)


def test_nothing_is_said_where_they_agree():
    assert not list(end_warnings(Ends(frozenset({0, 1}), 0, 1), None, "policy"))
    assert not list(end_warnings(Ends(frozenset(), 0, None), None, "policy"))


def test_a_given_stop_token_that_is_ordinary_text_stays_in_it(folders):
    """A newline, or the last letter of a tag, is what the policy wrote; <over> is not."""
    tokenizer = AutoTokenizer.from_pretrained(folders / "bytes-9")
    ordinary = tokenizer(["z"], add_special_tokens=False)["input_ids"][0]
    ends = ends_of(folders / "bytes-9", tokenizer, ordinary)
    assert set(ordinary) <= ends.ids
    assert written_text(tokenizer, ordinary, [True], ends.unwritten) == "z"
    assert len(VARIANTS) * len(KINDS) == len(CASES) == 40
