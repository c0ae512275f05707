"""A real browser, for what people look at: Debian's Chromium, driven by playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage"]
"""Containers of CI have 64 MB of shared memory; a full one stalls every page."""
PATIENCE = 90_000
"""Milliseconds."""


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, html: Path, width: int = 1440, scheme: str = "light") -> Iterator[Page]:
    """The page with all its charts drawn. Fails where it loads something or writes to the console."""
    said: list[str] = []
    loaded: list[str] = []
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, is_mobile=width < 500, offline=True
    )
    try:
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: loaded.append(request.url))
        page.goto(html.as_uri())
        page.wait_for_selector('html[data-drawn="true"]', state="attached")
        yield page
        assert said == []
        assert [url for url in loaded if not url.startswith(("data:", "blob:"))] == [html.as_uri()]
    finally:
        context.close()
