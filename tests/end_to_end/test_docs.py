"""The documentation's site: built without a warning, whole, without network, saying what the code says."""

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs.generate import PAGES, stale_pages
from docs.generate.config_page import config_page
from docs.generate.file_page import undescribed
from docs.generate.markdown import slug
from tests.support import ROOT, documented
from tests.support.documented import DOCS

LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
"""Elements for which a browser fetches something -> the attribute with its address."""
NOT_FETCHED = frozenset({"canonical", "prev", "next", "index", "search", "author"})
"""Values of ``<link rel>`` that only name a place."""


class Page(HTMLParser):
    """What a page links to, loads, and can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADING and given.get(LOADING[tag]) and given.get("rel") not in NOT_FETCHED:
            self.loads.append(given[LOADING[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` and CI build it."""
    folder = tmp_path_factory.mktemp("site")
    out = folder / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", folder / "trees", DOCS, out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return out


def test_the_site_has_every_page(site):
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    written = {path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")}
    assert written <= built


def test_every_link_and_anchor_leads_somewhere(site):
    @functools.cache
    def page(path: Path) -> Page:
        return Page(path.read_text())

    broken = []
    for path in site.rglob("*.html"):
        for link in [*page(path).links, *page(path).loads]:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            wrong_anchor = parts.fragment and target.suffix == ".html" and target.is_file()
            if not target.exists() or (wrong_anchor and unquote(parts.fragment) not in page(target).ids):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_no_page_loads_anything_from_the_network(site):
    found = [f"{path.name}: {load}" for path in site.rglob("*.html") for load in Page(path.read_text()).loads]
    assert found
    outside = [text for text in found if re.search(r": ([a-z]+:)?//", text) and ": data:" not in text]
    outside += [
        f"{path.name}: {address}"
        for path in [*site.rglob("*.css"), *site.rglob("*.html")]
        for address in re.findall(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")]+)", path.read_text())
    ]
    assert not outside


def test_drawings_are_in_the_page_and_follow_its_colours(site):
    text = (site / "explanation/architecture.html").read_text()
    assert "<svg" in text
    assert "var(--ink)" in text
    assert ".figure" in (site / "_static/site.css").read_text()


def test_commands_have_a_button_that_copies_them(site):
    assert "copybutton.js" in (site / "tutorial/quickstart.html").read_text()


def test_llms_txt_lists_every_page_with_its_source(site):
    listed = re.findall(r"^- \[.+\]\((\S+)\)$", (site / "llms.txt").read_text(), re.MULTILINE)
    pages = {path.relative_to(site) for path in site.rglob("*.html")}
    made = {Path("search.html"), Path("genindex.html")}
    assert {
        Path(one.removeprefix("_sources/")).with_suffix("").with_suffix(".html") for one in listed
    } == pages - made
    assert all((site / one).is_file() for one in listed)


def test_search_works_from_disk(site, tmp_path):
    browser = shutil.which("chromium")
    if not browser:
        pytest.skip("no chromium: run tests/install_browser.sh")
    address = f"{(site / 'search.html').as_uri()}?q=preemptible"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--virtual-time-budget=10000", "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "howto/slurm.html" in done.stdout


# --- what the pages say ---


def test_generated_pages_are_what_the_code_says():
    stale = [str(path.relative_to(ROOT)) for path in stale_pages()]
    assert not stale, f"run `make docs`: {stale} are older than the code"


def test_the_reference_has_no_page_that_nothing_makes():
    assert {path.name for path in (DOCS / "reference").glob("*.md")} == {*PAGES, "index.md"}


def test_every_file_of_a_run_is_described(complete_run):
    assert not undescribed(complete_run)


def repository_links() -> Iterator[tuple[str, Path, str]]:
    """Of README.md and the examples' pages: where, the file, and the anchor."""
    for page in [ROOT / "README.md", *(ROOT / "examples").rglob("README.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            if "://" not in link:
                yield str(page.relative_to(ROOT)), page.parent / path, anchor


def test_links_of_the_repositorys_pages():
    for where, path, anchor in repository_links():
        assert path.exists(), f"{where}: {path}"
        headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.M) if anchor else []
        assert not anchor or anchor in map(slug, headings), f"{where}: {path}#{anchor}"


NAMED = re.compile(r"`((?:pipeline|stages|slurm|configs|tests|docs|examples|benchmarks)/[\w/-]*\.\w+)`")


def test_files_of_the_project_that_pages_name_exist():
    named = {(page, name) for page in documented.pages() for name in NAMED.findall(page.read_text())}
    missing = [f"{page.relative_to(ROOT)}: {name}" for page, name in named if not (ROOT / name).is_file()]
    assert not missing


@pytest.mark.parametrize("page", sorted((DOCS / "howto").glob("*.md")), ids=lambda page: page.stem)
def test_a_how_to_ends_with_what_to_look_at_next(page):
    *_, last = page.read_text().strip().split("\n\n")
    assert "](" in last or "{toctree}" in last, f"{page.name} ends with: {last[:60]}"


MEASURING = re.compile(
    r"python (?:-m (?=benchmarks\.)|(?=benchmarks/|examples/))([\w./]+?)(?:\.py)?(?=[\s`])"
)
OPTION = re.compile(r"(?<=[`\s])--[a-z][\w-]*")


def sections(page: Path) -> list[str]:
    """Return the text of a page's parts, each with the heading that it begins with, without fenced blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.split(r"^(?=#+ )", text, flags=re.MULTILINE)


def test_benchmarks_that_pages_name_take_the_options_that_stand_there():
    """Options of a section are those of a benchmark or a command that it names."""
    wrong = []
    for where, section in ((page.name, part) for page in documented.pages() for part in sections(page)):
        names = [name.replace(".", "/") for name in MEASURING.findall(section)]
        sources = {name: (ROOT / f"{name}.py").read_text() for name in names}
        wrong += [f"{where}: {name}" for name, source in sources.items() if "__main__" not in source]
        spans = [span for span in re.findall(r"`([^`]+)`", section) if sources and "slurm-ppo" not in span]
        options = {option for span in spans for option in OPTION.findall(f" {span}")}
        known = "".join(sources.values())
        wrong += [f"{where}: {option}" for option in options if f'"{option}"' not in known]
    assert not wrong


def test_a_command_is_named_beside_all_that_was_measured():
    for section in sections(DOCS / "explanation/benchmarks.md")[2:]:
        assert re.search(r"`(?:python|make|slurm-ppo) ", section), section.splitlines()[0]


def test_defaults_are_written_as_yaml_writes_them():
    rows = [line.split(" | ") for line in config_page().splitlines() if line.startswith("| `")]
    defaults = [cells[2].strip("`") for cells in rows if len(cells) > 3]
    assert {"null", "true", "[0.9, 0.95]", "[failed, complete, stalled, trouble]", "'4:00:00'"} <= set(
        defaults
    )
    assert not [text for text in defaults if re.search(r"None|True|False|^\(|<\w", text)]
    assert "bEGIN" not in config_page()


@pytest.mark.parametrize("page", [DOCS / "explanation/loop.md"])
def test_code_that_a_page_quotes_is_in_the_tree(page):
    """Blocks of Python that make no file are quotations."""
    tree = {re.sub(r"(?m)^ +", "", path.read_text()) for path in (ROOT / "pipeline").rglob("*.py")}
    for block in documented.blocks(page):
        if block.language == "python" and not block.file:
            assert any(re.sub(r"(?m)^ +", "", block.text) in text for text in tree), block.where
