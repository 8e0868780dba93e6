"""How the tests of the console's screens look at a page."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import axe_playwright_python
from playwright.sync_api import Page

from tests.frontend.console import World, remembered

if TYPE_CHECKING:
    from django.test import Client

COLOURS = {"runOnly": ["color-contrast"]}
AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
SETTLED = """document.fonts.status === "loaded" && !document.querySelector(".waiting")
  && (!document.querySelector("[data-chart]") || "drawn" in document.documentElement.dataset)"""
WATCH = """
window.shift = 0;
new PerformanceObserver((list) => {
  for (const one of list.getEntries()) if (!one.hadRecentInput) window.shift += one.value;
}).observe({ type: "layout-shift", buffered: true });
"""


@dataclass
class Visited:
    page: Page
    complaints: list[str]
    weights: dict[str, int]  # bytes over the wire, by kind


def settle(page: Page) -> None:
    """Wait until fonts, panels and charts are there. `wait_for_function` would poll by eval, which the CSP forbids."""
    until = time.monotonic() + 30
    while not page.evaluate(SETTLED):
        assert time.monotonic() < until, "the page does not settle"
        page.wait_for_timeout(50)


def fail(*_: object) -> None:
    """What panels do in the state "error"."""
    raise RuntimeError("secret detail")


def weigh(seen: Visited, answer: Any) -> None:
    """What the answer's body takes over the wire, also if it came from the browser's cache this time."""
    kind = {"document": "html", "stylesheet": "css", "script": "js", "font": "font"}.get(answer.request.resource_type)
    if kind:
        seen.weights[kind] = seen.weights.get(kind, 0) + int(answer.headers["content-length"])


def logged_in(world: World, who: str) -> Client:
    from django.test import Client  # here: this file is read before Django is set up

    client = Client()
    client.force_login(world.person(who))
    remembered(client.session)
    return client


def accessible(page: Page, options: dict[str, Any] | None = None) -> None:
    """No violation of axe's rules, or of those that `options` name."""
    found = page.evaluate("(options) => axe.run(document, options)", {"resultTypes": ["violations"], **(options or {})})
    seen = [(rule["id"], rule["help"], [node["html"][:200] for node in rule["nodes"]]) for rule in found["violations"]]
    assert seen == []
