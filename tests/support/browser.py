"""Chromium of the machine, driven by Playwright; a page's JavaScript heap."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
MISSING = "no Chromium on PATH: install one, on Debian `apt-get install chromium`"


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser.

    Raises:
        FileNotFoundError: there is none.
    """
    program = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if program is None:
        raise FileNotFoundError(MISSING)
    with sync_playwright() as playwright:
        # No sandbox of its own: containers forbid it, and only pages of this project are opened.
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


def heap_bytes(page: Page) -> int:
    """Return what the scripts of a page hold, after a garbage collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    used = session.send("Runtime.getHeapUsage")["usedSize"]
    session.detach()
    return int(used)
