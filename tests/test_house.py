"""How the product's code is written: plain words, keyword arguments, one class of each name."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = [path for house in ("pipeline", "slurm", "stages") for path in sorted((ROOT / house).rglob("*.py"))]
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in SOURCES}
DIALECT = re.compile(
    r"\b(nobody|whoever|somebody|(is|are|was|were) told|wish(es|ed)?|sees? to)\b", re.IGNORECASE
)
"""What the field has other words for: none, the caller, a person, is notified, request, ensures."""
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
VAGUE = re.compile(r"\b(nobody|whoever|somebody|anybody|for good|look(s|ed)? into)\b", re.IGNORECASE)
"""Of a page: a plain statement names the user, the task or the process, and says what it does."""


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield docstrings, those of attributes among them."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value


def test_docstrings_use_the_words_of_the_field():
    found = {
        (p, text.lineno): DIALECT.findall(text.value)
        for p, tree in TREES.items()
        for text in docstrings(tree)
    }
    assert {where: [words[0] for words in said] for where, said in found.items() if said} == {}


def test_pages_say_who_does_what():
    found = {
        (str(page.relative_to(ROOT)), number): said.group()
        for page in PAGES
        for number, text in enumerate(page.read_text().splitlines(), 1)
        if (said := VAGUE.search(text))
    }
    assert found == {}


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
