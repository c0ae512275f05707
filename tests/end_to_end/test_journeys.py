"""Journeys of new users (docs/contributing/journeys.md): pages follow from README by links, with commands."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.config.keys import mistake_in_key
from tests.support import ROOT, documented

PAGE = documented.DOCS / "contributing/journeys.md"
README = ROOT / "README.md"
MOST_PAGES = 5
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


@dataclass(frozen=True)
class Journey:
    """A row of the page."""

    to: str
    pages: tuple[Path, ...]
    """Those after README, in their order."""
    words: tuple[str, ...]
    """Words that a command of these pages has; none where only reading is needed."""


def journeys() -> list[Journey]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    found = []
    for line in lines[1:]:
        to, pages, command, _ = (cell.strip() for cell in line.strip("|").split("|"))
        typed = re.fullmatch(r"`(slurm-ppo .*)`", command)
        words = tuple(shlex.split(typed[1])) if typed else ()
        found.append(Journey(to, tuple(linked(pages, PAGE)), words))
    return found


def linked(text: str, page: Path) -> list[Path]:
    """Return the files of this repository that a text of a page links to."""
    links = [link for link in _LINK.findall(text) if "://" not in link]
    return [(page.parent / link).resolve() for link in links]


@pytest.mark.parametrize("journey", journeys(), ids=lambda one: one.to)
def test_a_journey_leads_from_the_readme_to_its_command(journey):
    assert 1 + len(journey.pages) <= MOST_PAGES
    before = README
    for page in journey.pages:
        clicks = {*linked(README.read_text(), README), *linked(before.read_text(), before)}
        assert page in clicks, f"neither README.md nor {before.name} links to {page.name}"
        before = page
    typed = [shlex.split(c.text) for c in documented.all_commands() if ROOT / c.page in journey.pages]
    assert not journey.words or any(set(journey.words) <= set(words) for words in typed)


def test_every_page_is_a_few_clicks_away_also_where_the_site_is_not_built():
    """Tables of contents of Sphinx are no links for readers of the repository."""
    clicks, near = {README: 0}, [README]
    for page in near:
        for link in linked(page.read_text(), page):
            if link.suffix == ".md" and link.is_file() and link not in clicks:
                clicks[link] = clicks[page] + 1
                near.append(link)
    pages = set(documented.DOCS.rglob("*.md")) - {documented.DOCS / "index.md"}
    assert pages - clicks.keys() == set()
    assert max(clicks[page] for page in pages) <= MOST_PAGES


def test_every_journey_of_the_page_is_followed():
    assert len(journeys()) == PAGE.read_text().count("\n| ") - 1
    assert sum(bool(journey.words) for journey in journeys()) >= 5


def test_each_setting_of_a_script_of_trl_is_answered_with_ours():
    """Those of the script on the page, and those that most scripts have."""
    page = (documented.DOCS / "howto/coming_from.md").read_text()
    (given,) = re.findall(r"`GRPOConfig\(([^`]*)\)`", page)
    names = [*re.findall(r"(\w+)=", given), "max_steps", "output_dir", "num_iterations", "logging_steps"]
    names += ["min_p", "repetition_penalty", "lora_dropout"]
    assert {"beta", "num_generations", "gradient_accumulation_steps"} <= set(names)
    answers = {name: mistake_in_key(name, {}) for name in names}
    assert [name for name, found in answers.items() if not found or "here" not in found.text] == []
