"""Whether a tokenizer is the policy's own, and its chat template begins answers, by the files alone."""

import json
from dataclasses import replace

import pytest

from pipeline.data.fit import fit_warnings, missing_header
from pipeline.data.tokenizer_files import read_tokenizer
from tests.support import light, scripted

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT = CHATML.partition("{% if")[0]
INSTRUCT = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
THINKING = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n\n</think>\n\n{% endif")
ONLY_USERS = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
)

HEADERS = {
    "ChatML": (CHATML, ""),
    "ChatML without": (WITHOUT, "<|im_start|>assistant\n"),
    "answers that follow the question at once": (INSTRUCT, ""),
    "a prompt that skips thinking": (THINKING, ""),
    "a template of questions alone": (ONLY_USERS, ""),
}


@pytest.fixture
def policy(tmp_path):
    """A policy's directory, by its chat template and settings."""

    def make(template: str | None = None, **settings: object):
        folder = light.make_directory(tmp_path / "policy", 0, chat_template=template)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        return folder

    return make


@pytest.mark.parametrize(("template", "header"), HEADERS.values(), ids=HEADERS)
def test_what_a_template_leaves_between_question_and_answer_is_found(policy, template, header):
    assert missing_header(read_tokenizer(policy(template)), {}) == header


def warnings(folder, has_chats=True):
    config = scripted.imagined_run().config
    config = replace(config, model=replace(config.model, policy=str(folder)))
    return list(fit_warnings(config, read_tokenizer(folder), has_chats))


def test_a_template_is_warned_of_only_where_prompts_are_chats(policy):
    folder = policy(WITHOUT)
    (line,) = warnings(folder)
    assert line.startswith(f"warning: model.policy={folder}: its chat template has no generation prompt")
    assert r"'<|im_start|>assistant\n'" in line
    assert not warnings(folder, has_chats=False)


def test_a_tokenizer_of_far_fewer_ids_than_the_model_has_is_not_its_own(policy):
    (line,) = warnings(policy(vocab_size=49152))
    assert "its tokenizer has no token for 48,894 of the model's 49,152 ids" in line


def test_padding_is_no_reason_to_warn(policy):
    assert not warnings(policy(vocab_size=320))


def test_a_begin_token_that_is_not_the_models_is_named(policy):
    folder = policy(bos_token_id=5)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "<eos>"}))
    (line,) = warnings(folder)
    assert "its tokenizer's begin token is id 1 ('<eos>'), and bos_token_id of its config.json is 5" in line
