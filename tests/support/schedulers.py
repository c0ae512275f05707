"""Schedulers of conversations for tests: ``rollout.multi_turn.scheduler=tests.support.schedulers:NAME``."""

import random
import re
import sys
import time


def says(text, role="user"):
    return [{"role": role, "content": text}]


def echo(conversation):
    """Goes on for as long as it may, with something that follows from the turn."""
    time.sleep(random.uniform(0, 0.003))  # answers come back in any order
    return says(f"{conversation.num_turns}:{len(conversation.last_turn)}")


def until_third(conversation):
    return None if conversation.num_turns == 3 else says(f"go on {conversation.columns.get('answer')}")


def two_messages(conversation):
    return [*says("42", role="tool"), *says("and now?")]


def unicode_tool(conversation):
    return says('≈ 3,14 · 好的 🙂\x00 "quoted" <eos>', role="tool")


def long_winded(conversation):
    return says("word " * 10)


def silent(conversation):
    return says("")


def spoils_what_it_gets(conversation):
    for message in conversation.response_messages:
        message["content"] = "changed"
    conversation.response_messages.clear()
    conversation.columns.clear()
    return says("x")


def stops(conversation):
    return None


def raises(conversation):
    if conversation.prompt_id == "p3":
        raise KeyError("no tool for it")
    return None


def leaves(conversation):
    sys.exit(0)


def hangs(conversation):
    if conversation.prompt_id == "p3":
        time.sleep(3600)
    return None


def slow(conversation):
    time.sleep(1)
    return says("at last")


def never_yields(conversation):
    """Holds the interpreter lock for years."""
    re.match(r"(a+)+$", "a" * 64 + "b")


RUBBISH = {
    "number": 3,
    "text": "go on",
    "empty": [],
    "no_message": ["go on"],
    "no_content": [{"role": "user"}],
    "other_keys": [{"role": "user", "content": "x", "name": {1, 2}}],
    "no_text": [{"role": "user", "content": 5}],
    "half_a_character": [{"role": "tool", "content": "\ud83d"}],
}


def generates(conversation):
    yield from says("x")


def __getattr__(name):
    """``rubbish_KEY`` returns that."""
    key = name.removeprefix("rubbish_")
    if key == name or key not in RUBBISH:
        raise AttributeError(name)
    return lambda conversation: RUBBISH[key]
