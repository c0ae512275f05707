"""The picture of a report in README.md: what to look at, and the first curves.

    python docs/picture.py runs/quickstart/report.html docs/report.png

Needs Chromium (tests/install_browser.sh).
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTH, FIRST, LAST = 1280, "What to look at", "Reward components"
"""Pixels of the page, and the headings from which and up to which it is shown."""


def draw(report: Path, picture: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 1000})
        page.goto(report.resolve().as_uri())
        page.wait_for_selector('html[data-drawn="true"]', state="attached")
        top, bottom = (page.get_by_role("heading", name=name, exact=True).first for name in (FIRST, LAST))
        above, below = top.bounding_box(), bottom.bounding_box()
        if above is None or below is None:
            sys.exit(f"{report} has no headings {FIRST} and {LAST}")
        area = {"x": 0, "y": above["y"] - 12, "width": WIDTH, "height": below["y"] - above["y"]}
        page.screenshot(path=picture, full_page=True, clip=area)
        browser.close()


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
