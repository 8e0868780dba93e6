"""Helpers that open and check the console's pages in a browser."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import axe_playwright_python
import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright

from tests.support.frontend.console import FLAGS, World, client_of
from tests.support.frontend.live_server import LiveServer

if TYPE_CHECKING:
    from django.test import Client

# Limits for busy machines, not expected durations.
EXPECT_SECONDS, ACT_SECONDS = 30, 60
AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
SETTLED = """document.fonts.status === "loaded" && !document.querySelector(".panel-loading")
  && (!document.querySelector("[data-chart]") || "drawn" in document.documentElement.dataset)"""
WATCH = """
window.shift = 0;
new PerformanceObserver((list) => {
  for (const one of list.getEntries()) if (!one.hadRecentInput) window.shift += one.value;
}).observe({ type: "layout-shift", buffered: true });
"""
# The rules of axe that read colors. A color scheme changes nothing else: `console.css` uses only `light-dark(…)`.
COLOR_RULES = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@dataclass
class Visited:
    page: Page
    complaints: list[str]
    weights: dict[str, int]  # bytes over the wire, by kind


@contextmanager
def chromium(config: pytest.Config) -> Iterator[Browser]:
    """Start the system's Chromium. Without one the test is skipped, or fails with `--browser-must-run`.

    Chromium's build without a window is preferred: it takes less CPU time.
    """
    programs = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, programs)), None)
    if program is None:
        give_up = pytest.fail if config.getoption("--browser-must-run") else pytest.skip
        give_up("no Chromium on this machine: install the package `chromium` to run the browser tests")
    with sync_playwright() as playwright:
        expect.set_options(timeout=EXPECT_SECONDS * 1000)
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def windows(browser: Browser, live: LiveServer | None = None) -> Iterator[Callable[..., BrowserContext]]:
    """Yield a function that opens windows with separate cookies and long timeouts; close them at the end.

    With a server in this process (`live`), wait for the requests that were cancelled by closing. Otherwise they would
    run while the tables are emptied.
    """
    opened: list[BrowserContext] = []

    def window(**options: Any) -> BrowserContext:
        context = browser.new_context(**options)
        context.set_default_timeout(ACT_SECONDS * 1000)
        opened.append(context)
        return context

    yield window
    for context in opened:
        context.close()
    if live is not None:
        live.wait_until_idle()


def moved(page: Page, sign: Locator) -> None:
    """Wait for the page that a form led to, by an element that only this page has, and until its scripts have run.

    Before that, a link that opens a dialog is a plain link.
    """
    expect(sign).to_be_visible()
    page.wait_for_load_state()


def settle(page: Page) -> None:
    """Wait until fonts, panels and charts are there. `wait_for_function` would poll by eval, which the CSP forbids."""
    until = time.monotonic() + ACT_SECONDS
    while not page.evaluate(SETTLED):
        assert time.monotonic() < until, "the page does not settle"
        page.wait_for_timeout(50)


def fail(*_: object) -> None:
    """Raise an error, as panels do in the state "error"."""
    raise RuntimeError("secret detail")


def weigh(seen: Visited, answer: Any) -> None:
    """Add the transferred size of a response, also if it came from the browser's cache."""
    kind = {"document": "html", "stylesheet": "css", "script": "js", "font": "font"}.get(answer.request.resource_type)
    if kind:
        seen.weights[kind] = seen.weights.get(kind, 0) + int(answer.headers["content-length"])


def logged_in(world: World, who: str) -> Client:
    """Return a client with the session of a screen's user. A visitor's session is empty."""
    return client_of(who, world.owner, world.operator)


def accessible(page: Page, options: dict[str, Any] | None = None) -> None:
    """Check that the page violates none of axe's rules, or of the rules that `options` name."""
    found = page.evaluate("(options) => axe.run(document, options)", {"resultTypes": ["violations"], **(options or {})})
    seen = [(rule["id"], rule["help"], [node["html"][:200] for node in rule["nodes"]]) for rule in found["violations"]]
    assert seen == [], seen


def checked(page: Page) -> None:
    """Check the page with axe in light and dark, wide and at 320 pixels (1280 at a zoom of 400%, see WCAG 1.4.10).

    In dark, only COLOR_RULES are checked: all rules take most of the CPU time of these tests.
    """
    for theme, options in (("light", None), ("dark", COLOR_RULES)):
        page.emulate_media(color_scheme=theme)
        for width in (1440, 320):
            page.set_viewport_size({"width": width, "height": 900})
            accessible(page, options)
            assert page.evaluate(TOO_WIDE) <= 0, (page.url, width)


CONTROLS = """(within) => [...document.querySelectorAll(`${within} :is(a[href], button, input, select, textarea,
  summary, [tabindex='0'])`)].filter((one) => one.checkVisibility() && !one.disabled && one.tabIndex >= 0
  && one.type !== "hidden" && (one.type !== "radio" || one.checked)).length"""
FOCUSED = """(within) => { const one = document.activeElement;
  if (one === document.body || !one.closest(within)) return null;
  window.numbered ??= new Map(); if (!numbered.has(one)) numbered.set(one, numbered.size);
  return [numbered.get(one), getComputedStyle(one).outlineStyle, one.outerHTML.slice(0, 120)]; }"""


def reachable_by_keyboard(page: Page, within: str = "body") -> None:
    """Check that Tab reaches every control of a part of the page with a visible focus ring."""
    usable = page.evaluate(CONTROLS, within)
    parts = 3 * page.locator("input[type=date]").count()  # day, month, year and the picker are four tab stops
    seen = set()
    for _ in range(2 * usable + parts + 3):
        page.keyboard.press("Tab")
        if (at := page.evaluate(FOCUSED, within)) is not None:
            assert at[1] != "none", at[2]
            seen.add(at[0])
        if len(seen) >= usable:
            break
    assert usable > 0 and len(seen) >= usable - 1, (len(seen), usable)
