"""The page on numbers against the code: who reads a table, and by which function, is drawn there."""

import re
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.code_pages import Name, defined, file_of, imported, named, sources, written

PAGE = (ROOT / "docs/explanation/numbers.md").read_text()
ROWS = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\|.*`.*\|$", line)]
"""Cells: the number, who makes or shows it, from what."""
TABLES = ("attempts", "costs", "row", "spans")
COUNTING = {*(f"metrics/{name}.py" for name in TABLES), "workers/summary.py", "decide/passages.py"}
"""Modules whose functions count what people see, or what estimates rest on."""


@pytest.mark.parametrize(("path", "name"), sorted(set(named(PAGE))))
def test_what_the_page_names_exists(path, name):
    assert file_of(path).is_file()
    assert not name or name in defined(file_of(path))


@pytest.mark.parametrize("cells", ROWS, ids=lambda cells: cells[0].strip("| "))
def test_who_shows_a_number_imports_what_the_page_says(cells):
    _, makers, origins = cells
    used = [set(imported(file_of(path))) for path, _ in named(makers)]
    wanted = set(named(origins))
    assert used
    assert all(wanted & names for names in used)
    assert wanted <= set.union(*used)


def asked(path: Path) -> set[Name]:
    """Return the functions of COUNTING that a file imports or calls."""
    if not re.search(r"from pipeline\.(metrics|workers\.summary|decide)\b", path.read_text()):
        return set()
    return {(file, name) for file, name in imported(path) if file in COUNTING and name.islower()}


def drawn() -> set[tuple[str, str]]:
    """Return who reads from what, as files."""
    return {(maker, file) for _, makers, of in ROWS for maker, _ in named(makers) for file, _ in named(of)}


def test_whoever_counts_is_on_the_page():
    """A number of a new surface has to come from a table, and to be drawn."""
    outside = [
        path for path in sources("pipeline", "stages") if path.parent.name not in ("decide", "simulate")
    ]
    reading = {
        (written(path), file) for path in outside if written(path) not in COUNTING for file, _ in asked(path)
    }
    assert reading <= drawn()


def test_whoever_reads_spans_is_on_the_page():
    makers = {maker for maker, _ in drawn()} | {"metrics/attempts.py"}
    reading = {
        written(path)
        for path in sources("pipeline", "stages")
        if re.search(r"journal\.\w+\((?:self\.)?run\.paths\.spans", path.read_text())
    }
    assert reading - {"orchestrate/rewind.py"} <= makers  # which moves what is taken back


def test_it_is_read_in_five_minutes():
    assert len(PAGE.split()) <= 1100
