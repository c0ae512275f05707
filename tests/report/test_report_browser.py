"""The report in a real browser: it draws, hover and filters work, it fits, and the console stays empty."""

import struct
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from docs import pictures
from pipeline.config.changeable import Difference
from pipeline.report import write_comparison, write_report, write_sweep_report
from pipeline.run import journal
from pipeline.run.changes import SettingsChange, write_changes
from pipeline.run.directory import Run
from tests.support.browsing import chromium, needs_chromium, opened
from tests.support.reportrun import (
    SLURM,
    commit_shard,
    make_row,
    make_run,
    make_spans,
    slurm_row,
    write_spans,
)
from tests.support.sweeps import make_sweep

pytestmark = needs_chromium
SHARDS = 2
EVIL = "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
TALE = "\u202eonce upon a time \x07"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """On Slurm, 12 of 20 iterations; the newest two have samples."""
    run = make_run(tmp_path_factory.mktemp("report") / "run", SHARDS, scheduler=SLURM)
    rows = [make_row(i) | slurm_row(i, make_spans(i, SHARDS)) for i in range(1, 13)]
    journal.rewrite(run.paths.metrics, rows)
    write_spans(run, range(1, 13), SHARDS)
    for iteration in (11, 12):
        for shard in range(SHARDS):
            count = 30
            commit_shard(
                run,
                iteration,
                shard,
                responses=[f"Reply {i} {EVIL} " + "word " * i for i in range(count)],
                rewards=[shard + i / 2 for i in range(count)],
                prompts=[f"{TALE} {i}" if i == 3 else f"Question {i}" for i in range(count)],
                reasons=["length" if i % 10 == 0 else "stop" for i in range(count)],
                reference=[[-0.5 - i / 100] * len(f"Reply {i} {EVIL} " + "word " * i) for i in range(count)],
            )
    long = ["/home/ada/bin/tell", *(f"--channel=runs-of-model-{number}" for number in range(20))]
    changed = (
        Difference("notify.command", None, long),
        Difference("scheduler.update.time", "4:00:00", "8:00:00"),
    )
    write_changes(run.paths, [SettingsChange(0.0, "ada", 7, changed)])
    return run.with_newest_settings()


@pytest.fixture(scope="module")
def html(run) -> Path:
    return write_report(run)


@pytest.fixture(scope="module")
def opened_page(browser, html):
    with opened(browser, html) as page:
        yield page


@pytest.fixture
def page(opened_page) -> Page:
    """The report as it is when it was just opened."""
    opened_page.get_by_role("button", name="Reset").click()
    opened_page.locator("#count", has_text="80 of 80").wait_for()
    opened_page.locator("#window").select_option(index=0)
    opened_page.mouse.move(0, 0)
    return opened_page


def shown(page: Page) -> list[str]:
    return page.locator("#cards .card").all_inner_texts()


def numbers(page: Page, what: str) -> list[float]:
    """One number of each card, in the order shown."""
    texts = page.locator("#cards .numbers").all_inner_texts()
    return [float(text.split(f" {what}")[0].split(" ")[-1]) for text in texts]


def surplus(page: Page) -> int:
    """Pixels by which the page is wider than the window."""
    root = "document.documentElement"
    return page.evaluate(f"{root}.scrollWidth - {root}.clientWidth")


COLOURS = {"light": "rgb(0, 114, 178)", "dark": "rgb(86, 180, 233)"}


def test_everything_is_drawn_and_fits_in_light_and_dark(browser, html):
    with opened(browser, html, width=390) as page:
        for width in (390, 1440):
            page.set_viewport_size({"width": width, "height": 900})
            for scheme, blue in COLOURS.items():
                page.emulate_media(color_scheme=scheme)
                page.locator(f'#chart-reward .scatterlayer path[style*="stroke: {blue}"]').last.wait_for()
                page.wait_for_selector('html[data-drawn="true"]', state="attached")
                assert page.locator(".plot").count() == page.locator(".plot.js-plotly-plot").count() > 15
                assert surplus(page) == 0
        assert page.title() == "demo"


def test_a_page_counts_as_loaded_once_all_is_drawn_so_that_a_capture_shows_it(browser, html):
    """A headless browser that is told to take a picture does so when the page is loaded, and ends."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    plots = "[...document.querySelectorAll('.plot')].filter(e => e.querySelector('.main-svg')).length"
    page.add_init_script(f"addEventListener('load', () => {{ window.drawnAtLoad = {plots}; }})")
    page.goto(html.as_uri())
    assert page.evaluate("window.drawnAtLoad") == page.locator(".plot").count() > 15
    assert page.locator("iframe").count() == 0
    page.close()


def test_changed_settings_are_a_table_of_words_that_fits(page):
    table = page.locator(".changes")
    looks = "e => [e.scrollWidth - e.clientWidth, getComputedStyle(e.querySelector('td')).textAlign]"
    assert table.evaluate(looks) == [0, "left"]
    key, before, after = table.locator("tr").nth(2).locator("td").all_inner_texts()[3:]
    assert (key, before, after) == ("scheduler.update.time", "4:00:00", "8:00:00")


def test_what_is_printed_is_drawn_whole_for_paper_and_the_screen_is_as_it_was_afterwards(browser, html):
    with opened(browser, html, width=1440, scheme="dark") as page:
        page.evaluate(LOOKS)
        page.evaluate("drawAll(); addEventListener('beforeprint', () => { window.printed = looks(); })")
        assert len(page.pdf()) > 100_000
        widths, colours, count, waits = page.evaluate("window.printed")
        assert (count, waits) == (page.locator(".plot").count(), 0), "some were still to be drawn"
        assert colours == [COLOURS["light"]]
        assert max(widths) <= 700, "a page of A4 or Letter is narrower than a window"
        page.wait_for_selector('html[data-drawn="true"]', state="attached")
        widths, colours, *_ = page.evaluate("looks()")
        assert (max(widths) > 1000, colours) == (True, [COLOURS["dark"]])


LOOKS = """window.looks = () => {
  const plots = [...document.querySelectorAll('.plot .main-svg')];
  const lines = [...document.querySelectorAll('#chart-reward .scatterlayer path.js-line')].slice(-1);
  return [plots.map(e => Number(e.getAttribute('width'))), lines.map(e => e.style.stroke),
    document.querySelectorAll('.plot.js-plotly-plot').length, waiting.length]; }"""
"""Widths of what is drawn, colour of the reward's line, number of charts, and of those still to be drawn."""


def hover(page: Page, place: str) -> str:
    """What the timeline says about what is there."""
    target = page.locator(f"#timeline-plot {place}").first
    target.scroll_into_view_if_needed()
    box = target.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = page.locator("#timeline-plot .hoverlayer .hovertext")
    label.wait_for()
    return label.text_content()


def test_the_timeline_says_job_node_and_log(page):
    text = hover(page, ".barlayer .trace .point path")
    for part in ("rollout shard", "iteration 1", "job 1", "on gpu-0", "waited", "ran 3", "log: logs/0001"):
        assert part in text


def test_failed_attempts_are_marked_and_say_why(page):
    assert page.locator("#timeline-plot .scatterlayer .point").count() == 3, "one in each iteration shown"
    assert "NODE_FAIL: the node <gone>" in hover(page, ".scatterlayer .point")


def test_the_reader_chooses_the_window_of_the_timeline(page):
    bars = page.locator("#timeline-plot .barlayer .point")
    many = bars.count()
    assert page.locator("#later").is_disabled()
    page.locator("#earlier").click()
    assert page.locator("#window").input_value() == "attempts:12:12"
    assert bars.count() * 3 == many
    page.locator("#window").select_option("stages:1:12")
    assert page.locator("#earlier").is_disabled()
    assert 12 * 4 < bars.count() <= 12 * 8
    assert page.locator("#timeline-plot .ytick").all_text_contents() == ["gpu", "small", "big", "cpu"]


def test_samples_are_filtered_and_sorted(page):
    count = page.locator("#count")
    assert len(shown(page)) == 20
    rewards = numbers(page, "reward")
    assert rewards == sorted(rewards, reverse=True)
    page.locator("#f-text").press_sequentially("reply 29 ")
    assert 0 < len(shown(page)) <= 4
    assert all("Reply 29 " in text for text in shown(page))
    page.locator("#f-text").fill("nowhere in them")
    assert (count.inner_text(), shown(page)) == ("0 of 80", [])
    page.locator("#f-text").fill("")
    page.locator("#f-reason").select_option("length")
    assert all("length" in text for text in page.locator("#cards .numbers").all_inner_texts())
    page.locator("#f-iteration").select_option("11")
    assert all("iteration 11" in text for text in shown(page))


def test_samples_by_reward_range_and_order(page):
    page.locator("#f-low").fill("2")
    page.locator("#f-high").fill("5")
    found = numbers(page, "reward")
    assert found
    assert all(2 <= reward <= 5 for reward in found)
    page.locator("#f-sort").select_option("kl-up")
    found = numbers(page, "KL")
    assert found == sorted(found)
    page.locator("#f-sort").select_option("length-down")
    found = numbers(page, "tokens")
    assert found == sorted(found, reverse=True)
    page.locator("#f-choice").select_option("best")
    assert shown(page) == []


def test_more_samples_are_shown_on_demand(page):
    for expected in (40, 60, 80):
        page.get_by_role("button", name="Show more").click()
        assert len(shown(page)) == expected
    assert page.locator("#more").is_hidden()


def test_what_a_response_says_is_never_obeyed(page):
    page.locator("#f-text").fill("once upon")
    for text in shown(page):
        assert EVIL in text
        assert "⟨U+202E⟩once upon a time ⟨U+0007⟩" in text
    assert page.locator("#cards img").count() == 0
    assert page.title() == "demo"


@pytest.mark.parametrize("count", [0, 1, 300])
def test_short_and_long_runs_draw_without_errors(browser, tmp_path, count):
    run = make_run(tmp_path / "run")
    journal.rewrite(run.paths.metrics, [make_row(i + 1, 300) for i in range(count)])
    with opened(browser, write_report(run)) as page:
        assert page.locator(".plot").count() == page.locator(".js-plotly-plot").count()


def test_runs_are_compared_on_one_page(browser, run, tmp_path):
    other = make_run(tmp_path / "other", SHARDS, seed=3)
    journal.rewrite(other.paths.metrics, [make_row(i) for i in range(1, 6)])
    with opened(browser, write_comparison([run, other], tmp_path / "both.html"), width=390) as page:
        assert surplus(page) == 0
        assert page.locator("#chart-losses .scatterlayer path.js-line").count() == 4
        lines = page.locator("#chart-entropy .scatterlayer path.js-line")
        assert lines.evaluate_all("all => all.map(e => e.style.stroke)") == [
            COLOURS["light"],
            "rgb(198, 82, 0)",
        ]
        legend = page.locator("#chart-entropy .legendtext").all_text_contents()
        assert legend == [f"demo ({run.identity.id})", f"demo ({other.identity.id})"]


def test_console_errors_would_be_noticed(browser: Browser, tmp_path):
    html = tmp_path / "broken.html"
    html.write_text('<html data-drawn="true"><script>absent()</script></html>')
    with pytest.raises(AssertionError), opened(browser, html):
        pass


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (400, "dark")])
def test_the_report_of_a_sweep_draws_and_fits(browser, tmp_path, width, scheme):
    make_sweep(tmp_path / "lr", ["1e-6", "3e-6", "1e-5"], 2)
    with opened(browser, write_sweep_report(tmp_path / "lr"), width, scheme) as page:
        assert page.locator("#outcomes tbody tr").count() == 3
        assert page.locator("#chart-reward .fills path").count() == 3
        assert page.locator(".beside").count() > 1
        assert surplus(page) == 0


def test_the_pictures_on_the_site_are_of_what_people_see(browser, run, html, tmp_path):
    """A report's first curves, and a terminal."""
    pictures.draw_report(browser, html, tmp_path / "report.png")
    lines = pictures.screen_of(run)
    assert any(line.plain.startswith("reward ") for line in lines), "its curves"
    pictures.draw_screen(browser, lines, tmp_path / "watch.png")
    for name in ("report.png", "watch.png"):
        content = (tmp_path / name).read_bytes()
        width, height = struct.unpack(">II", content[16:24])  # of the PNG's first chunk
        assert content.startswith(b"\x89PNG")
        assert width > 600
        assert height > 300
