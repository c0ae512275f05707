"""The page on decisions against the code: a newcomer finds each decision there, and what is there exists."""

import ast
import re
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.code_pages import defined, file_of, imported, named, sources, written

DECIDE = ROOT / "pipeline/decide"
PAGE = (ROOT / "docs/explanation/decisions.md").read_text()
MODULES = sorted(path for path in DECIDE.glob("*.py") if path.stem != "__init__")
NAMED = named(PAGE)
"""Files, and names in them."""
IMPURE = {"open", "input", "print", "exec", "eval", "__import__"}


@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED)))
def test_what_the_page_names_exists(path, name):
    assert file_of(path).is_file()
    assert not name or name in defined(file_of(path))


def asked_by(path: Path) -> set[tuple[str, str]]:
    """Return the functions of decide/ that a file uses, by the module's name."""
    rules = {written(path): path.stem for path in MODULES}
    return {(rules[file], name) for file, name in imported(path) if file in rules and name.islower()}


def functions_asked() -> set[tuple[str, str]]:
    """Return the functions of decide/ that passes and workers call."""
    asking = [p for p in sources("pipeline", "stages") if p.parent.name not in ("decide", "simulate")]
    return {one for path in asking if "pipeline.decide" in path.read_text() for one in asked_by(path)}


def test_every_module_and_every_function_that_is_asked_is_on_the_page():
    named = {(Path(path).stem, name) for path, name in NAMED if path.startswith("decide/")}
    assert {path.stem for path in MODULES} <= {module for module, _ in named}
    assert functions_asked() <= named


def test_the_simulator_asks_what_passes_and_workers_ask():
    """What it calls itself is called by them too: there is no rule that is only its own."""
    own = {one for path in (ROOT / "pipeline/simulate").glob("*.py") for one in asked_by(path)}
    assert own <= functions_asked()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_decision_touches_nothing(path):
    """What it imports has a contract (``make check``); here are calls that need no import."""
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not IMPURE.intersection(call.id for call in calls if isinstance(call, ast.Name))
    attributes = {call.attr for call in calls if isinstance(call, ast.Attribute)}
    assert not attributes & {"read_text", "write_text", "read_bytes", "write_bytes", "unlink", "mkdir"}


def test_the_questions_of_a_newcomer_have_headings():
    headings = re.findall(r"^#+ (.*)", PAGE, re.M)
    for question in (
        "Who decides that a worker leaves",
        "What happens between a commit and the next task",
        "Where the end of a killed attempt is judged",
        "How to add an executor (PBS, LSF)",
    ):
        assert question in headings


def test_it_is_read_in_ten_minutes():
    assert len(PAGE.split()) <= 2000
