"""Charts in a browser: values by pointer and keyboard, marks, requests of a point, and natural steps of time."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.test import Client
from playwright.sync_api import BrowserContext, Page, expect

from tenants import actions
from tenants.models import Tenant, User
from tests.support.frontend.console import remembered
from tests.support.frontend.pages import AXE, accessible

pytestmark = [pytest.mark.usefixtures("table"), pytest.mark.acme("Acme Robotics", roles=["owner"])]
TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
STEPS = """(days) => {
  const element = document.querySelector("[data-chart=chart-tokens]");
  return element.drawn.axes[0]._splits.map((s) => new Date(s * 1000).toISOString().slice(0, 10));
}"""


@pytest.fixture
def open_page(window: Callable[..., BrowserContext], served: str, acme: Tenant, use: Any) -> Callable[..., Page]:
    """Return a function that opens a page of a tenant with usage on two days and a published policy."""
    for ago, output in ((1, 700), (0, 500)):
        use(acme, at=datetime.now(UTC) - timedelta(days=ago), uncached=1000, output=output)
    actions.do_publish_policy(acme, "fast", {"models": ["smollm2-135m"]}, check_targets=False)
    client = Client()
    client.force_login(User.objects.get(email="owner@example.com"))
    remembered(client.session)

    def open_page(path: str, width: int = 1440) -> Page:
        context = window(base_url=served, viewport={"width": width, "height": 900})
        context.add_cookies([{"name": "sessionid", "value": client.session.session_key, "url": served}])
        page = context.new_page()
        page.add_init_script(path=AXE)
        page.goto(path, wait_until="networkidle")
        return page

    return open_page


def times_of(url: str) -> str:
    return url.replace("%3A", ":").partition("?")[2]


def test_values_are_read_by_keyboard_and_enter_opens_the_requests(open_page):
    page = open_page("/t/acme/usage/?range=7d")
    chart = page.get_by_role("slider", name=re.compile("^Tokens by type"))
    box = chart.locator(".chart-tooltip")
    expect(box).to_be_hidden()
    page.get_by_label("Tokens as a table").focus()
    page.keyboard.press("Shift+Tab")
    expect(chart).to_be_focused()
    expect(box).to_contain_text("Output500")
    expect(box).to_contain_text("Alias fast: version 1 published")
    expect(chart).to_have_attribute("aria-valuetext", re.compile(r"Output 500.*Alias fast: version 1 published"))
    page.keyboard.press("ArrowRight")  # there is no later day
    expect(chart).to_have_attribute("aria-valuenow", "6")
    page.keyboard.press("ArrowLeft")
    expect(box).to_contain_text("Output700")
    expect(box).not_to_contain_text("Alias fast")
    page.keyboard.press("Home")
    expect(chart).to_have_attribute("aria-valuenow", "0")
    page.keyboard.press("Escape")
    expect(box).to_be_hidden()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    page.wait_for_url("**/t/acme/requests/?*")
    day = TODAY - timedelta(days=1)
    assert times_of(page.url) == f"range=times&from={day:%Y-%m-%d}T00:00:00.000Z&to={TODAY:%Y-%m-%d}T00:00:00.000Z"
    expect(page.locator(".panel-error")).to_have_count(0)


def test_a_click_opens_the_requests_of_a_day(open_page):
    page = open_page("/t/acme/usage/?range=7d&model=smollm2-135m")
    plot = page.locator("[data-chart=chart-tokens] .u-over")
    size = plot.bounding_box()
    assert size is not None
    plot.hover(position={"x": size["width"] * 0.5, "y": 40})
    expect(page.locator(".chart-tooltip:visible")).to_have_count(1)
    plot.click(position={"x": size["width"] * 0.5, "y": 40})
    page.wait_for_url("**/t/acme/requests/?*")
    middle = TODAY - timedelta(days=3)
    assert f"model=smollm2-135m&range=times&from={middle:%Y-%m-%d}T00:00:00.000Z" in times_of(page.url)


def test_enter_in_the_explorer_opens_the_requests_of_all_segments(open_page):
    page = open_page("/t/acme/usage/explorer/?range=7d&measure=tokens")
    page.locator("[data-chart=chart-explorer]").focus()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/t/acme/requests/\?range=times&from="))


@pytest.mark.parametrize(("days", "width"), [(7, 1440), (30, 1440), pytest.param(90, 600, marks=pytest.mark.extended)])
def test_steps_of_time_are_days_mondays_or_months(open_page, days, width):
    first = TODAY - timedelta(days=days - 1)
    page = open_page(f"/t/acme/usage/?range=custom&from={first:%Y-%m-%d}&to={TODAY:%Y-%m-%d}", width)
    steps = [datetime.fromisoformat(step) for step in page.evaluate(STEPS)]
    assert len(steps) >= 2
    gaps = {(later - earlier).days for earlier, later in pairwise(steps)}
    assert gaps <= {1} or gaps <= {2} or ({step.weekday() for step in steps} == {0}) or {s.day for s in steps} == {1}


def test_a_focused_chart_is_accessible(open_page):
    page = open_page("/t/acme/")
    page.locator("[data-chart=chart-tokens]").focus()
    page.keyboard.press("End")
    expect(page.locator("[data-chart=chart-tokens] .chart-tooltip")).to_be_visible()
    accessible(page)
