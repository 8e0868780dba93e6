"""Models, of a tenant and of operators, in states that the registered screens do not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from playwright.sync_api import BrowserContext, Page, expect

from frontend.operator.models import page as operator_models
from frontend.tenant.models import page as tenant_models
from frontend.tenant.playground import page as playground
from inference_worker.contract.settings import ModelSpec
from millrace.apps.deployments.fleet_status import FleetStatus
from tests.support.frontend.console import load_screens
from tests.support.frontend.live_server import LiveServer
from tests.support.frontend.pages import accessible, settle

TENANT, OPERATOR, PLAYGROUND = "/t/acme/models/", "/operator/models/", "/t/acme/playground/"
load_screens()  # which make the replicas, cordons and aliases of the world
LONG = "a-model-" + "with-a-very-long-name-" * 4


def _long_names(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    specs = settings.MILLRACE.models
    _serve(monkeypatch, (replace(specs[0], name=LONG), *specs))  # which has neither a price nor a replica


def _no_models(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    _serve(monkeypatch, ())


def _serve(monkeypatch: pytest.MonkeyPatch, specs: tuple[ModelSpec, ...]) -> None:
    for module in (tenant_models, operator_models, playground):
        monkeypatch.setattr(module, "served_specs", lambda: specs)


def _no_workers(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    _patch(monkeypatch, lambda: FleetStatus((), (), None, None))


def _no_broker(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    def fail() -> FleetStatus:
        raise redis.ConnectionError

    _patch(monkeypatch, fail)


def _patch(monkeypatch: pytest.MonkeyPatch, read: Callable[[], FleetStatus]) -> None:
    for module in (tenant_models, operator_models):
        monkeypatch.setattr(module, "read_fleet_status", read)


# The URL of each state in the short form of the tests.
SHORT = {_long_names: TENANT, _no_models: PLAYGROUND, _no_workers: OPERATOR, _no_broker: OPERATOR}


@pytest.fixture
def go(contexts: Callable[[str], BrowserContext], live: LiveServer) -> Iterator[Callable[[str], Page]]:
    """Opens a page as an operator or as the owner."""
    opened: list[Page] = []

    def go(url: str) -> Page:
        page = contexts("operator" if url.startswith("/operator/") else "owner").new_page()
        opened.append(page)
        page.goto(url)
        settle(page)
        return page

    yield go
    for page in opened:
        page.close()
    live.wait_until_idle()


def check(page: Page) -> None:
    """All of axe's rules, and nothing wider than the window, on a desk in light and on a phone in dark."""
    for width, theme in ((1440, "light"), (390, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        accessible(page)
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{wide} pixels wider than {width}"


@pytest.mark.parametrize(
    ("state", "url"),
    [
        pytest.param(
            *(state, url),
            marks=[] if SHORT[state] == url else [pytest.mark.extended],
            id=f"{state.__name__.strip('_')}-{url}",
        )
        for state in SHORT
        for url in (TENANT, OPERATOR, PLAYGROUND)
    ],
)
def test_a_state_is_accessible(go, monkeypatch, settings, state, url):
    state(monkeypatch, settings)
    check(go(url))


@pytest.mark.parametrize(("url", "link"), [(TENANT, "API example"), (OPERATOR, "Drain"), (OPERATOR, "Uncordon")])
def test_what_opens_over_the_page_is_accessible(go, monkeypatch, settings, url, link):
    page = go(url)
    page.locator("main").get_by_role("link", name=link).first.click()
    expect(page.locator("dialog[open] h1")).to_be_visible()
    check(page)


@pytest.mark.parametrize("url", [TENANT, pytest.param(OPERATOR, marks=pytest.mark.extended)])
def test_the_palette_and_the_menus_are_accessible(go, url):
    page = go(url)
    page.locator(".display-menu summary").click()
    check(page)
    page.locator(".display-menu summary").click()
    page.set_viewport_size({"width": 390, "height": 900})
    page.get_by_role("button", name="Menu").click()
    expect(page.get_by_role("link", name="Models").first).to_be_visible()
    accessible(page)
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Search or jump to").click()
    expect(page.get_by_role("dialog", name="Search").get_by_role("link", name="Models").first).to_be_visible()
    check(page)
