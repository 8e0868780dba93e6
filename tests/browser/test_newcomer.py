"""The first jobs of a new user, with their clicks, filled fields and seconds; `pytest -s` prints them as a table.

Each job starts on the overview, and an operator's on the health page. A click is a click, a chosen option or a key that
submits. The gateway of the playground is the test.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, WebSocketRoute, expect

from tests.support.frontend.console import PASSWORD, World, load_screens

load_screens()  # whose rows the jobs use
# The most clicks of each job. A job that needs more has become harder.
MOST_CLICKS = {
    "Sign in": 1,
    "Cost of today": 3,
    "Create a project": 3,
    "Create a key": 4,
    "Set a budget": 4,
    "Raise a budget": 4,
    "Story of a rejected request": 3,
    "PDF of an invoice": 2,
    "Compare two models": 4,
    "Invite a colleague": 4,
    "Run a batch": 4,
    "Add a deployment": 4,
    "Refund": 5,
}


@dataclass
class Job:
    """One job, which counts what the user does."""

    page: Page
    clicks: int = 0
    fields: int = 0
    seconds: float = 0
    began: float = field(default_factory=time.monotonic)

    def click(self, target: Locator) -> None:
        target.click()
        self.clicks += 1

    def choose(self, target: Locator, value: str) -> None:
        target.select_option(value)
        self.clicks += 1

    def fill(self, target: Locator, text: str) -> None:
        target.fill(text)
        self.fields += 1

    def link(self, name: str, **options: Any) -> None:
        self.click(self.page.get_by_role("link", name=name, **options).first)

    def button(self, name: str, **options: Any) -> None:
        self.click(self.page.get_by_role("button", name=name, **options).first)

    def sees(self, target: Locator) -> None:
        """Wait until the job is done."""
        expect(target.first).to_be_visible()
        self.seconds = time.monotonic() - self.began


@pytest.fixture(scope="module")
def done() -> Iterator[dict[str, Job]]:
    """The jobs that were done, which are printed at the end."""
    found: dict[str, Job] = {}
    yield found
    sys.stdout.write(f"\n{'job':30} {'clicks':>6} {'fields':>6} {'seconds':>8}\n")
    for name, job in found.items():
        sys.stdout.write(f"{name:30} {job.clicks:6} {job.fields:6} {job.seconds:8.1f}\n")


@pytest.fixture
def begin(window: Callable[..., BrowserContext], served: str, world: World, done: dict[str, Job]) -> Callable[..., Job]:
    """Return a function that signs a user in and begins a job on the start page."""
    from tests.support.frontend.pages import logged_in

    def begin(name: str, who: str = "owner", path: str = "/t/acme/") -> Job:
        context = window(base_url=served, accept_downloads=True, viewport={"width": 1440, "height": 900})
        cookie = {"name": "sessionid", "value": logged_in(world, who).session.session_key, "url": served}
        context.add_cookies([cookie])
        page = context.new_page()
        page.goto(path)
        page.wait_for_load_state()
        done[name] = Job(page)
        return done[name]

    return begin


@pytest.fixture(autouse=True)
def few_clicks(request: pytest.FixtureRequest, done: dict[str, Job]) -> Iterator[None]:
    yield
    for name, job in done.items():
        assert 0 < job.clicks <= MOST_CLICKS[name], name


def test_sign_in(window, served, world, done):
    page = window(base_url=served).new_page()
    page.goto("/login")
    done["Sign in"] = job = Job(page)
    job.fill(page.get_by_label("Email address"), "owner@example.com")
    job.fill(page.get_by_label("Password"), PASSWORD)
    job.button("Sign in")
    job.sees(page.get_by_role("heading", name="Your organizations"))


def test_cost_of_today(begin):
    job = begin("Cost of today")
    job.click(job.page.locator(".range-menu summary").first)
    job.link("Today", exact=True)
    job.sees(job.page.locator("#panel-stats .stat-value"))
    assert "range=today" in job.page.url


def test_create_a_project(begin):
    job = begin("Create a project")
    job.link("Projects", exact=True)
    job.link("New project")
    job.fill(job.page.get_by_role("dialog").get_by_label("Name"), "Newcomer")
    job.button("Create project")
    job.sees(job.page.get_by_role("status").get_by_text("Newcomer was created."))


def test_create_a_key(begin):
    job = begin("Create a key")
    job.link("Create key")
    job.fill(job.page.get_by_role("dialog").get_by_label("Name"), "first")
    job.button("Create key")
    job.sees(job.page.get_by_text("You won’t be able to see it again."))


def test_set_a_budget(begin):
    job = begin("Set a budget")
    job.link("Budgets and quotas")
    job.click(job.page.get_by_role("link", name="New budget").first)
    limit = job.page.get_by_role("textbox", name="Limit", exact=True)
    expect(limit).to_be_visible()
    job.fill(limit, "500")
    job.button("Create budget")
    job.sees(job.page.locator("#panel-tree").get_by_text("$500"))


def test_raise_a_budget(begin):
    job = begin("Raise a budget")
    job.link("Budgets and quotas")
    job.click(job.page.locator("#panel-tree").get_by_role("link", name="Raise").first)
    job.fill(job.page.get_by_role("dialog").get_by_label("Raise by"), "50")
    job.button("Raise limit")
    job.sees(job.page.locator("#panel-tree").get_by_text("more until"))


def test_story_of_a_rejected_request(begin):
    job = begin("Story of a rejected request")
    job.link("Requests", exact=True)
    job.link("Rate limited", exact=True)
    row = job.page.locator("#panel-log tbody tr").filter(has=job.page.get_by_text("Rate limited"))
    job.click(row.first.get_by_role("link").first)
    job.sees(job.page.get_by_role("dialog").get_by_text("Blocked by"))


def test_pdf_of_an_invoice(begin):
    job = begin("PDF of an invoice")
    job.link("Invoices", exact=True)
    with job.page.expect_download() as download:
        job.click(job.page.locator("#panel-list").get_by_role("link", name="PDF").first)
    job.sees(job.page.locator("#panel-list"))
    assert download.value.path().read_bytes().startswith(b"%PDF")


def test_compare_two_models(begin):
    job = begin("Compare two models")
    models: list[str] = []

    def serve(socket: WebSocketRoute) -> None:
        def receive(text: str | bytes) -> None:
            sent = json.loads(text)
            if sent.get("type") == "auth":
                socket.send(json.dumps({"type": "ready"}))
                return
            models.append(sent["model"])
            choice = {"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}
            chunk = {"type": "chunk", "chunk": {"model": sent["model"], "choices": [choice]}}
            for message in ({"type": "started", "request_id": "req_1"}, chunk, {"type": "done"}):
                socket.send(json.dumps({"id": sent["id"], **message}))

        socket.on_message(receive)

    job.page.route_web_socket("**/v1/realtime/chat", serve)
    job.link("Playground")
    boxes = job.page.locator("[name=model]")
    expect(boxes.first).to_be_visible()
    job.click(boxes.nth(1))
    job.fill(job.page.get_by_label("Message"), "Hello!")
    job.button("Send")
    expect(job.page.locator("[data-state]").get_by_text("Complete")).to_have_count(2)
    job.sees(job.page.locator("[data-state]"))
    assert len(set(models)) == 2


def test_invite_a_colleague(begin):
    job = begin("Invite a colleague")
    job.link("Members", exact=True)
    job.link("Invite")
    dialog = job.page.get_by_role("dialog")
    job.fill(dialog.get_by_label("Email address"), "colleague@example.com")
    job.choose(dialog.get_by_label("Role"), "developer")
    job.button("Send invitation")
    job.sees(job.page.get_by_role("status").get_by_text("colleague@example.com was invited."))


def test_run_a_batch(begin, settings: Any, tmp_path: Path) -> None:
    settings.MILLRACE = replace(settings.MILLRACE, data_dir=tmp_path)
    line = {"custom_id": "n1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": []}}
    job = begin("Run a batch")
    job.link("Batches", exact=True)
    job.link("New batch")
    chosen = job.page.get_by_label("Upload a file")
    chosen.set_input_files(
        [{"name": "night.jsonl", "mimeType": "application/jsonl", "buffer": json.dumps(line).encode()}]
    )
    job.fields += 1
    job.button("Create batch")
    job.sees(job.page.get_by_text("night.jsonl"))


def test_add_a_deployment(begin):
    job = begin("Add a deployment", who="operator", path="/operator/")
    job.link("Deployments", exact=True)
    job.link("Add deployment")
    job.link("Catalog")
    job.fill(job.page.get_by_label("Name", exact=True), "newcomer")
    job.button("Add deployment")
    job.sees(job.page.get_by_role("status").get_by_text("newcomer was added."))


def test_refund(begin, world):
    job = begin("Refund", who="operator", path="/operator/")
    from billing.models import Invoice
    from tests.support.rows import unscoped

    number = str(unscoped(Invoice).get(pk=world.rows["populated.invoice"]).number)
    job.link("Billing runs")
    job.click(job.page.get_by_role("link", name=number).first)
    job.link("Credit note")
    dialog = job.page.get_by_role("dialog")
    job.fill(dialog.get_by_label("Description"), "Refund")
    job.fill(dialog.get_by_label("Amount"), "1.00")
    job.fill(dialog.get_by_label("Reason"), "Slow answers")
    job.fill(dialog.get_by_label(f"Type {number} to confirm"), number)
    job.button("Issue credit note")
    job.sees(job.page.get_by_role("status").get_by_text("was issued."))
