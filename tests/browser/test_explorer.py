"""The cost explorer in a browser: a click on a segment filters, Shift-click opens its requests; long names fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from playwright.sync_api import BrowserContext, Page, expect

from tenants import actions
from tenants.models import Tenant, User
from tests.support.frontend.console import remembered
from tests.support.rows import only_project

pytestmark = [pytest.mark.usefixtures("table"), pytest.mark.acme("Acme Robotics", roles=["owner"])]
NAMES = {"latin": "k" * 200, "arabic": "مفتاح" * 40, "japanese": "鍵の名前" * 50}


@pytest.fixture
def open_page(window: Callable[..., BrowserContext], served: str, acme: Tenant, use: Any) -> Callable[..., Page]:
    """Return a function that opens a page of a tenant whose keys have long names."""
    project = only_project(acme)
    for number, name in enumerate(NAMES.values(), 1):
        key, _ = actions.do_create_api_key(project, name)
        for ago in range(6):
            at = datetime.now(UTC) - timedelta(days=ago)
            use(acme, at=at, project_id=project.pk, key_id=key.pk, uncached=1000 * number, end_user=name[:128])
    client = Client()
    client.force_login(User.objects.get(email="owner@example.com"))
    remembered(client.session)

    def open_page(path: str, width: int = 1440) -> Page:
        context = window(base_url=served, viewport={"width": width, "height": 900})
        context.add_cookies([{"name": "sessionid", "value": client.session.session_key, "url": served}])
        page = context.new_page()
        page.goto(path, wait_until="networkidle")
        return page

    return open_page


EXPLORER = "/t/acme/usage/explorer/?range=7d&measure=tokens"


def test_a_click_filters_and_a_shift_click_opens_the_requests(open_page):
    page = open_page(f"{EXPLORER}&group=key")
    largest = page.locator('a[data-segment="0"]')
    expect(largest).to_have_text(NAMES["japanese"])
    largest.click(modifiers=["Shift"])
    page.wait_for_url(re.compile(r"/t/acme/requests/\?range=7d&key=\d+$"))
    page.go_back()
    largest.click()
    page.wait_for_url(re.compile(r"/usage/explorer/\?range=7d&measure=tokens&key=\d+$"))


def test_a_click_in_the_chart_selects_the_segment_under_the_pointer(open_page):
    """The three segments are stacked, the largest on top, with 3, 2 and 1 sixths of the height."""
    page = open_page(f"{EXPLORER}&group=key")
    plot = page.locator(".explorer .u-over")
    box = plot.bounding_box()
    assert box is not None
    links = [page.locator(f'a[data-segment="{number}"]').get_attribute("href") for number in range(3)]
    for number, part in ((0, 0.75), (1, 0.35), (2, 0.08)):
        place = {"x": box["width"] * 0.6, "y": box["height"] * (1 - part / 1.08)}
        plot.hover(position=place)
        plot.click(position=place)
        page.wait_for_url(lambda url, wanted=links[number]: url.endswith(str(wanted)))
        page.go_back()
        plot.wait_for()
    plot.hover(position=place)
    plot.click(position=place, modifiers=["Shift"])
    page.wait_for_url(re.compile(r"/t/acme/requests/"))


@pytest.mark.parametrize("width", [390, pytest.param(1440, marks=pytest.mark.extended)])
def test_long_names_of_any_script_fit(open_page, width):
    for group in ("key", "end_user"):
        page = open_page(f"{EXPLORER}&group={group}", width)
        assert page.locator(".panel-error").count() == 0
        assert page.locator("a[data-segment]").count() == 3
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0
        page.locator(".explorer .u-over").hover()
        page.locator(".explorer .chart-tooltip").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
