"""Damaged and odd conversations, and texts of any unicode and size: each is refused by row or read as it is
written, by validate, the run's first task, rollouts and reward models alike.

With SOAK_ROUNDS=20, as `make soak` has it, 500 are tried for each template instead of 25.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.checks import judge
from pipeline.data.messages import ReadAs, as_dicts
from pipeline.data.prompts import Prompt, PromptError, Prompts
from pipeline.data.rendering import ScoringTemplate
from pipeline.run.paths import RunPaths
from pipeline.run.shards import write_in_chunks
from stages.generation.chat import messages_of
from stages.rewards.rows import conversation_ids, tools_of
from stages.tasks.prepare import prompt_table
from tests.support.chats import ANY, CALL, CHAT, MANY, RENDERING, TOOL, policy_folder, read, tokenizers
from tests.support.chats import TEMPLATES as SMALL_TEMPLATES
from tests.support.processes import config_of

TEMPLATES = SMALL_TEMPLATES | {
    "as of Llama 3": (
        "{{ bos_token }}{% for m in messages %}{% if not (m.role == 'ipython' or m.role == 'tool' or "
        "'tool_calls' in m) %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
        "m['content'] | trim + '<|eot_id|>' }}{% elif 'tool_calls' in m %}{% if not m.tool_calls|length == 1 "
        "%}{{ raise_exception('one call') }}{% endif %}{{ m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments | tojson }}{% else %}{{ m.content | tojson }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant{% endif %}"
    ),
    "as of Qwen 3": (
        "{%- if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
        "{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{%- for m in messages %}{%- if m.content is string %}{% set c = m.content %}{% else %}"
        "{% set c = '' %}{% endif %}{%- if m.role == 'assistant' %}{% if '</think>' in c %}"
        "{{ c.split('</think>')[-1] }}{% else %}{{ c }}{% endif %}{% for call in m.tool_calls or [] %}"
        "{% if call.function %}{% set call = call.function %}{% endif %}<tool_call>{{ call.name }}"
        "{{ call.arguments }}</tool_call>{% endfor %}{% elif m.role == 'tool' %}<tool_response>{{ c }}"
        "</tool_response>{% else %}<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>{% endif %}{% endfor %}"
    ),
    "as of Gemma": (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "<start_of_turn>{{ m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    ),
}
VERBATIM = ("plain", "subscripts", "dated")
"""Templates that write each content as it is, once."""
UNICODE = st.text(min_size=1, max_size=12) | st.builds(
    lambda one, times: one * times,
    st.sampled_from(
        ["x", "\u200b", "\ufeff", "\x00", "👩‍👩‍👧", "e\u0301", "\u202e", "\r\n", "<eos>", "\ud800", "﷽"]
    ),
    st.sampled_from([1, 40, 3000]),
)
Chat = list[Any]
DAMAGES: dict[str, Callable[[Chat, Any], object]] = {
    **dict.fromkeys(("nothing", "nothing at all", "not a thing"), lambda chat, any_: None),
    "a key is gone": lambda chat, any_: chat[-1].pop("content"),
    "no role": lambda chat, any_: chat[0].pop("role", None),
    "ShareGPT": lambda chat, any_: chat.__setitem__(0, {"from": "human", "value": "Hi"}),
    "another role": lambda chat, any_: chat[0].update(role="Human"),
    "a role of blanks": lambda chat, any_: chat[0].update(role=" user"),
    "a content of anything": lambda chat, any_: chat[-1].update(content=any_),
    "a content of parts": lambda chat, any_: chat[-1].update(content=[{"type": "text", "text": any_}, "b"]),
    "a content of one part": lambda chat, any_: chat[0].update(content={"type": "text", "text": "a"}),
    "an image": lambda chat, any_: chat[0].update(content=[{"type": "image"}, {"type": "text", "text": "a"}]),
    "a key of anything": lambda chat, any_: chat[0].update(reasoning_content=any_, weight=any_),
    "calls of anything": lambda chat, any_: chat[0].update(role="assistant", tool_calls=any_),
    "calls of anyone": lambda chat, any_: chat[0].update(tool_calls=[{"function": any_}]),
    "calls with objects": lambda chat, any_: chat.insert(
        0,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": any_}}}],
        },
    ),
    "a message of text": lambda chat, any_: chat.append("Hi"),
    "a message of anything": lambda chat, any_: chat.append(any_),
    "an answer at the end": lambda chat, any_: chat.append({"role": "assistant", "content": "I"}),
    "two of one": lambda chat, any_: chat.extend(copy.deepcopy(chat)),
    "none": lambda chat, any_: chat.clear(),
    "nested": lambda chat, any_: chat.__setitem__(slice(None), [copy.deepcopy(chat)]),
}


def damaged(chat: Chat, damage: str, any_: Any, as_text: bool) -> Any:
    found = copy.deepcopy(chat)
    DAMAGES[damage](found, any_)
    return json.dumps(found) if as_text else found


ODD = st.builds(
    damaged, CHAT, st.sampled_from(sorted(DAMAGES)), UNICODE | ANY, st.sampled_from([False] * 4 + [True])
)
PROMPT = st.sampled_from([ODD, ODD, ODD, UNICODE]).flatmap(lambda one: one)
TOOLS = st.sampled_from([st.lists(TOOL, max_size=2)] * 6 + [st.lists(CALL, max_size=1), ANY]).flatmap(
    lambda one: one
)
ROW = st.fixed_dictionaries({"prompt": PROMPT}, optional={"tools": TOOLS})


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return policy_folder(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def config(inputs, policy, tmp_path_factory):
    """One whose prompts may be long: what is refused is refused for what it is."""
    made = config_of(inputs, tmp_path_factory.mktemp("run") / "run")
    given = replace(made.model, policy=str(policy), context_length=4096)
    return replace(made, model=given, data=replace(made.data, max_prompt_tokens=2000))


@pytest.mark.soak
@pytest.mark.parametrize("template", TEMPLATES)
@given(rows=st.lists(ROW, min_size=1, max_size=4), answer=UNICODE)
@MANY
def test_a_conversation_is_refused_by_row_or_read_as_it_is_written(
    template, rows, answer, policy, config, tmp_path_factory
):
    path = tmp_path_factory.mktemp("odd") / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        found = read(path)
    except PromptError as error:  # of the whole file, such as a column that is tools in no row
        assert_one_line(str(error))
        return
    seen, ran = tokenizers(policy, TEMPLATES[template])
    scoring = [ScoringTemplate("rm", seen, RENDERING)]
    validated = judge("data.prompts", str(path), found, config, RENDERING, seen, scoring)
    judged = judge(
        "data.prompts", str(path), found, config, RENDERING, ran, [ScoringTemplate("rm", ran, RENDERING)]
    )
    assert validated.kept == judged.kept
    assert [str(row) for row in validated.rejected] == [str(row) for row in judged.rejected]
    assert len(judged.kept) + len(judged.rejected) == len(rows)
    for row in judged.rejected:
        assert_one_line(row.detail)
    for i in judged.kept:
        check_is_as_written(found.rows[i], rows[found.rows[i].row], found)
        check_text(found.rows[i], judged.texts[i], judged.tokens[i], ran, template)
    check_is_read_again(judged, path.parent, ran, answer)


def assert_one_line(text: str) -> None:
    assert "\n" not in text


def check_is_as_written(prompt: Prompt, row: dict[str, Any], found: Prompts) -> None:
    """Check that a prompt has the row's content; but for what is counted as read otherwise."""
    written, kinds = row["prompt"], {reading.kind for reading in found.read_as}
    if isinstance(prompt.prompt, str):
        assert prompt.prompt == written
        return
    if isinstance(written, str):
        assert ReadAs.JSON_TEXT in kinds
        written = json.loads(written)
    messages = as_dicts(prompt.prompt)
    for message, original in zip(messages, written, strict=True):
        more = {
            key: one for key, one in original.items() if key not in ("role", "content") and one is not None
        }
        assert {key: one for key, one in message.items() if key not in ("role", "content")} == more
        assert message["role"] == original["role"]
        assert len(more) == len(original.keys() - {"role", "content"}) or ReadAs.NULL_KEYS in kinds
        if isinstance(original.get("content"), list):
            assert ReadAs.JOINED_PARTS in kinds
            parts = [one if isinstance(one, str) else one["text"] for one in original["content"]]
            assert message["content"] == "".join(parts)
        else:
            assert message["content"] == original.get("content")


def check_text(prompt: Prompt, text: str, ids: Any, tokenizer: Any, template: str) -> None:
    """Check that the policy reads all of a prompt: its ids are those of the text, and contents are in it."""
    assert tokenizer.decode(list(ids)) == text
    if isinstance(prompt.prompt, str):
        assert text == prompt.prompt
    elif template in VERBATIM:
        assert all((message.content or "") in text for message in prompt.prompt)


def check_is_read_again(judged: Any, folder: Path, tokenizer: Any, answer: str) -> None:
    """Check that a rollout's tasks read from the shard what was judged, and reward models take all of it."""
    table = prompt_table(judged)
    write_in_chunks(RunPaths(folder), folder / "shard.arrow", table)
    with pa.ipc.open_file(str(folder / "shard.arrow")) as reader:
        stored = reader.read_all()
    columns = ("prompt_text", "prompt_messages", "prompt_tokens")
    lines = zip(*(stored[name].to_pylist() for name in columns), tools_of(stored), judged.kept, strict=True)
    for text, messages, ids, tools, i in lines:
        prompt = judged.found.rows[i]
        assert (text, ids) == (judged.texts[i], list(judged.tokens[i]))
        assert (messages_of(messages) or text) == prompt.prompt
        assert (json.loads(tools) if tools else None) == (list(prompt.tools) if prompt.tools else None)
        response = answer.encode(errors="replace").decode()
        assert conversation_ids(tokenizer, RENDERING, text, messages, response, tools=tools)
