"""How the product's code is written: plain words, keyword arguments, one class of each name."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [path for house in ("pipeline", "slurm", "stages") for path in sorted((ROOT / house).rglob("*.py"))]
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in SOURCES}
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
REFUSED = {
    "nobody|somebody|anybody|whoever": "none; the user, the owner, any process",
    "(is|are|was|were|be|been|being) told(?! apart)": "is notified",
    "sees? to": "ensures",
    "wish(es|ed)?": "request",
    "anew": "again",
    "st(and|ands|ood) still": "is stalled",
    "bells?|rung": "signal, notified",
    "books": "rows, the publisher",
    "thin(s|ned|ning)? out": "prune",
    "for good": "permanently, or nothing",
    "look(s|ed)? into": "read, list, examine",
    "at work": "running, active, busy",
    "at that moment": "then",
}
"""Words that texts do without, as patterns, and the field's words for what they say."""
SAID = re.compile("|".join(rf"\b({words})\b".replace(" ", r"\s+") for words in REFUSED), re.IGNORECASE)


def texts_of_sources() -> Iterator[tuple[str, int, str]]:
    """Yield where each text is and what it says: strings, among them help and docstrings, and comments."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path, node.lineno, node.value
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            yield path, number, line.partition("#")[2]


def refused(texts: Iterable[tuple[str, int, str]]) -> list[str]:
    """Say where texts, each of which begins at a line of a file, have a refused word."""
    return [
        f"{where}:{line + text.count(chr(10), 0, said.start())}: {said.group()}"
        for where, line, text in texts
        for said in SAID.finditer(text)
    ]


def test_help_errors_and_comments_have_the_words_of_the_field():
    assert refused(texts_of_sources()) == []


def test_pages_have_the_words_of_the_field():
    """Those of docs/reference too, which are made from help and docstrings."""
    assert refused((str(page.relative_to(ROOT)), 1, page.read_text()) for page in PAGES) == []


@pytest.mark.parametrize("text", ["Nobody waits.", "it is\ntold", "files are thinned out", "it sees to that"])
def test_a_refused_word_is_found(text):
    assert refused([("page", 1, text)])


def test_no_call_gets_a_tuple_that_was_written_to_be_unpacked():
    """Arguments that are many have names: ``f(a=a, b=b)`` says more than ``f(*(a, b))``."""
    calls = [
        (path, node) for path, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, ast.Call)
    ]
    splats = [(path, a) for path, call in calls for a in call.args if isinstance(a, ast.Starred)]
    assert [(path, a.lineno) for path, a in splats if isinstance(a.value, ast.Tuple)] == []


def test_a_class_has_its_name_for_itself():
    classes = [
        node.name for _, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    assert [name for name, count in Counter(classes).items() if count > 1] == []
