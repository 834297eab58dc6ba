"""A headless Chromium, and a page that remembers everything that went wrong on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stepscope.analyze import analyze, compare
from stepscope.records import Run
from stepscope.report import html

ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NAMES = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Opened:
    """A page, the URL it was opened from, and what it logged, threw and asked for."""

    page: Any
    url: str
    console: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def until(self, condition: str) -> None:
        """Polls from outside: the page's policy forbids the eval that wait_for_function needs."""
        for _ in range(400):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(25)
        raise AssertionError(f"never came true: {condition}")

    def assert_clean(self) -> None:
        assert self.console == []
        assert self.errors == []
        assert self.requests == [self.url]
        assert self.page.locator("#trouble").is_hidden()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    # Where the page must be tested, a missing browser is a failure, not a skip.
    absent = pytest.fail if os.environ.get("STEPSCOPE_REQUIRE_BROWSER") else pytest.skip
    try:
        from playwright import sync_api
    except ImportError:
        absent("playwright is not installed")
    installed = filter(None, map(shutil.which, NAMES))
    found = os.environ.get("STEPSCOPE_CHROMIUM") or next(installed, None)
    if found is None:
        absent("no Chromium: install it or set STEPSCOPE_CHROMIUM to its path")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def show(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """show(run, ..., width=, scheme=): writes the report of these runs and opens it from disk."""
    contexts = []

    def open_page(*runs: Run, width: int = 1280, scheme: str = "light") -> Opened:
        entries = [(run.meta.label, run, analyze(run)) for run in runs]
        path = tmp_path / "report.html"
        found = compare(entries) if len(entries) > 1 else None
        path.write_text(html.page(entries, found), encoding="utf-8")
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, device_scale_factor=2
        )
        contexts.append(context)
        opened = Opened(context.new_page(), path.as_uri())
        opened.page.on("console", lambda message: opened.console.append(message.text))
        opened.page.on("pageerror", lambda error: opened.errors.append(str(error)))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(opened.url)
        opened.until("VIEWS[0] !== undefined || !document.querySelector('#trouble').hidden")
        return opened

    yield open_page
    for context in contexts:
        context.close()
