"""Chats, tools and files of prompts for property tests, and tokenizers with chat templates that read them.

With SOAK_ROUNDS=20, as `make soak` has it, 500 inputs of each kind are tried instead of 25.
"""

import json
import os
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from pipeline.data.chat import Rendering
from pipeline.data.prompts import Prompts, read_prompts
from pipeline.data.tokenizer_files import FileTokenizer, read_tokenizer
from tests.support import tiny

ROUNDS = int(os.environ.get("SOAK_ROUNDS", "1"))
MANY = settings(
    max_examples=25 * ROUNDS,
    derandomize=ROUNDS == 1,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
RENDERING = Rendering(1_767_225_600.0)


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
CALL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": WORDS, "arguments": st.just('{"city": "Oslo"}')}),
    },
    optional={"id": WORDS},
)
ASSISTANT = st.fixed_dictionaries(
    {"role": st.just("assistant")}, optional={"content": WORDS, "reasoning_content": WORDS}
) | st.fixed_dictionaries(
    {
        "role": st.just("assistant"),
        "content": st.none() | WORDS,
        "tool_calls": st.lists(CALL, min_size=1, max_size=2),
    }
)
SPOKEN = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "developer"]), "content": WORDS}, optional={"name": WORDS}
)
RESULT = st.fixed_dictionaries(
    {"role": st.just("tool"), "content": WORDS}, optional={"tool_call_id": WORDS, "name": WORDS}
)
QUESTION = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": WORDS})
CHAT = st.builds(
    lambda before, last: [*before, last], st.lists(SPOKEN | ASSISTANT | RESULT, max_size=3), QUESTION
)
TOOL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": WORDS}, optional={"strict": st.booleans()}),
    }
)


TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "subscripts": "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}",
    "tools and thinking": (
        "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c | tojson }}</call>{% endfor %}"
        "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    ),
    "strict": (
        "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'tool'] %}"
        "{{ raise_exception('no ' + m.role) }}{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
        "{{ m.role + m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}{% endfor %}{% endfor %}"
    ),
    "dated": "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}",
}
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.just("\ud83d"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)


def read(path: Path, **changes: Any) -> Prompts:
    """Read a file of prompts, by the default columns unless others are given."""
    given = {"prompt_column": "prompt", "id_column": None, "split": "train", "tools_column": "tools"}
    return read_prompts(path, **given | changes)


def tokenizers(policy: Path, template: str) -> tuple[FileTokenizer, PreTrainedTokenizerFast]:
    """Those of validate and of a run, with a chat template."""
    seen, loaded = read_tokenizer(policy), PreTrainedTokenizerFast.from_pretrained(policy)
    seen.chat_template = loaded.chat_template = template
    return seen, loaded


def policy_folder(folder: Path) -> Path:
    """Write what is read of a policy before it is loaded: its settings, and a tokenizer of bytes."""
    tiny.byte_tokenizer(("<pad>", "<eos>")).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 258, "max_position_embeddings": 4096}))
    return folder
