"""Paths of any characters on the command line: taken as they are typed, or refused in one line.

With SOAK_ROUNDS=20, as `make soak` has it, 500 paths of each kind are tried instead of ten.
"""

import re

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.config.compose import compose
from pipeline.config.issue import ConfigError
from tests.support.chats import MANY, ROUNDS

NAMES = st.text("aä中 7_-.", min_size=1, max_size=8) | st.text(
    "a =$'\"{}[](),:;~!@#%&*+?\\|<>😀\n\t", min_size=1, max_size=6
)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(lambda names: "/data/" + "/".join(names))
SOME = settings(MANY, max_examples=10 if ROUNDS == 1 else 25 * ROUNDS)


def prompts_of(word: str) -> str:
    words = ["model.policy=policy", "reward=model", "reward.components.rm.path=rm"]
    return str(compose([f"data.prompts={word}", *words]).data.prompts)


def in_quotes(path: str) -> str:
    """As Hydra has it: what is special means itself, but a quote, and backslashes before one."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), path)
    return f"'{escaped}'"


@given(path=PATHS)
@example(path="/data/my set, v2 (final).jsonl")
@example(path="007")
@example(path="null/../1e3")
@SOME
def test_a_path_is_taken_as_it_is_typed_or_refused_in_one_line(path):
    try:
        assert prompts_of(path) == path.strip(" \t") or "${" in path
    except ConfigError as error:
        (line,) = str(error).splitlines()
        assert "data.prompts" in line


@given(path=PATHS.filter(lambda path: "${" not in path))
@example(path="/data/it's a = {b}, [c] \\")
@SOME
def test_in_quotes_every_path_is_taken(path):
    assert prompts_of(in_quotes(path)) == path
