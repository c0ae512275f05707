"""The pictures of a report and of `slurm-ppo watch` on these pages, of a run that this makes.

    python -m docs.pictures RUN [FOLDER]

Runs the quickstart's demo into the run directory RUN, or goes on with it; takes watch.png half-way, and
report.png at the end, into FOLDER (docs). Needs Chromium (tests/install_browser.sh).
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.text import Text

from pipeline import open_run
from pipeline.run.directory import Run, load_run
from pipeline.status.snapshot import read_status
from pipeline.watch.screen import ScreenState, screen

WIDTH, FIRST, LAST = 1280, "What to look at", "Reward components"
"""Pixels of the report, and the headings from which and up to which it is shown."""
COLUMNS, LINES = 100, 22
"""Size of the terminal that `watch` is shown in."""
NAME = "runs/first"
"""Run directory in the picture: not that of the machine that took it."""
HALF_WAY = 6
"""Iterations, of the quickstart's twelve."""
PATIENCE = 90_000
"""Milliseconds for a page, on a machine that does other things."""
LONGEST = 1800.0
"""Seconds that the run may take."""
TERMINAL = """<pre style="margin: 0; padding: 12px; width: max-content; background: #1c1c1c; color: #d0d0d0;
font: 15px/1.25 'DejaVu Sans Mono', monospace">{code}</pre>"""


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def draw_report(browser: Browser, report: Path, picture: Path) -> None:
    """Take the picture of a report: what to look at, and the first curves."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 1000})
    page.set_default_timeout(PATIENCE)
    page.goto(report.resolve().as_uri())
    page.wait_for_selector('html[data-drawn="true"]', state="attached")
    top, bottom = (page.get_by_role("heading", name=name, exact=True).first for name in (FIRST, LAST))
    above, below = top.bounding_box(), bottom.bounding_box()
    if above is None or below is None:
        raise ValueError(f"{report} has no headings {FIRST} and {LAST}")
    area = {"x": 0, "y": above["y"] - 12, "width": WIDTH, "height": below["y"] - above["y"]}
    page.screenshot(path=picture, full_page=True, clip=area)
    page.close()


def screen_of(run: Run) -> list[Text]:
    """Return what `slurm-ppo watch` shows of a run now, as if it were NAME."""
    lines, root = screen(read_status(run), ScreenState(), COLUMNS, LINES), str(run.paths.root)
    lines[0].plain = lines[0].plain.replace(root, NAME.ljust(len(root)))
    return lines


def draw_screen(browser: Browser, lines: list[Text], picture: Path) -> None:
    """Take the picture of a terminal that shows these lines."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, highlight=False)
    for line in lines:
        console.print(line, no_wrap=True)
    page = browser.new_page(viewport={"width": WIDTH, "height": 600})
    page.set_default_timeout(PATIENCE)
    page.set_content(console.export_html(inline_styles=True, code_format=TERMINAL))
    page.locator("pre").screenshot(path=picture)
    page.close()


def wait_for(is_there: Callable[[], bool], running: subprocess.Popen[bytes], what: str) -> None:
    """Wait for something that a run does while it goes on.

    Raises:
        RuntimeError: the run ended without it, or takes longer than half an hour.
    """
    end = time.monotonic() + LONGEST
    while not is_there():
        if running.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the run has not come to {what}")
        time.sleep(0.2)


def rows_of(run_dir: Path) -> int:
    return open_run(run_dir).metrics().num_rows if (run_dir / "run.json").is_file() else 0


def make_pictures(run_dir: Path, folder: Path) -> None:
    """Run the demo, and take both pictures."""
    command = [sys.executable, "-m", "pipeline"]
    is_begun = (run_dir / "run.json").is_file()
    words = ["resume", str(run_dir)] if is_begun else ["quickstart", f"run_dir={run_dir}"]
    running = subprocess.Popen([*command, *words])
    try:
        wait_for(lambda: rows_of(run_dir) >= HALF_WAY, running, f"iteration {HALF_WAY}")
        lines = screen_of(load_run(run_dir))
        if running.wait(LONGEST):
            raise RuntimeError("the run has failed")
    finally:
        running.terminate()
    with chromium() as browser, tempfile.TemporaryDirectory() as taken:
        draw_screen(browser, lines, Path(taken, "watch.png"))
        draw_report(browser, run_dir / "report.html", Path(taken, "report.png"))
        for picture in Path(taken).iterdir():
            shutil.move(picture, folder / picture.name)


if __name__ == "__main__":
    make_pictures(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "docs"))
