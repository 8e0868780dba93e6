"""One figure is one text: tokens, requests, rates and cost of a tenant on all screens that show them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import unescape
from typing import Any

import pytest
from django.test import Client

from tenants import actions
from tenants.models import Tenant, User
from tests.support.billing import books
from tests.support.request_log import records
from tests.support.rows import only_project

pytestmark = [pytest.mark.django_db, pytest.mark.acme(signed_in="owner")]
# 1 of 213 is 0.469%, 2 of 213 are 0.939%: truncated, or with another number of digits, they are other texts.
REQUESTS, FAILED, LIMITED = 213, 1, 2
# 1,337,750 tokens truncated are 1.33M. 11,970 are 11.9K with three truncated digits.
COUNTS = ({"uncached": 700_000, "cache_read": 624_780, "output": 1_000}, {"uncached": 11_970})
ACCEPTED, TOKENS, INPUT = "2", "1.34M", "1.34M"


def text_of(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", html)).strip()


def stat(page: str, label: str) -> str:
    """Return the value of a figure in a strip, without its change."""
    term = rf"<dt>(?:<span[^>]*>)?{re.escape(label)}(?:</span>)?</dt>"
    found = re.search(rf'{term}<dd><span class="stat-value[^>]*>(.*?)</dd>', page, re.S)
    assert found, label
    return text_of(found[1].split('<span class="delta')[0])


def cells(page: str, label: str) -> set[str]:
    """Return the values of a column, without the second line of its cells."""
    found = re.findall(rf'data-label="{re.escape(label)}">(.*?)</td>', page, re.S)
    assert found, label
    return {text_of(re.sub(r'<span class="text-muted">.*?</span>', "", cell, flags=re.S)) for cell in found}


def read(client: Client, path: str) -> str:
    response = client.get(path)
    assert response.status_code == 200, path
    page: str = response.content.decode()
    assert "did not load" not in page, path
    return page


@pytest.fixture
def pages(client: Client, acme: Tenant, use: Any) -> dict[str, str]:
    """The screens that show the usage of a tenant with one key, in its console and in that of operators."""
    project, version, now = only_project(acme), books.rate_card(), datetime.now(UTC)
    key, _ = actions.do_create_api_key(project, "prod")
    for counts in COUNTS:
        use(acme, key_id=key.pk, project_id=project.pk, price_version=version, at=now, **counts)
    outcomes = ["failed"] * FAILED + ["limited"] * LIMITED + ["completed"] * (REQUESTS - FAILED - LIMITED)
    status = {"failed": "500", "limited": "429", "completed": "200"}
    for number, outcome in enumerate(outcomes):
        at = {"started_at": now, "key_id": key.pk, "project_id": project.pk}
        records.record(acme, number, outcome=outcome, status=status[outcome], **at)
    operator = Client()
    operator.force_login(User.objects.create_superuser("op@example.com"))
    return {
        "overview": read(client, "/t/acme/?range=month"),
        "usage": read(client, "/t/acme/usage/?range=month"),
        "keys": read(client, "/t/acme/usage/?range=month&group=key"),
        "log": read(client, "/t/acme/requests/panels/stats?range=month"),
        "histogram": read(client, "/t/acme/requests/panels/histogram?range=month"),
        "key": read(client, f"/t/acme/keys/{key.pk}/"),
        "project": read(client, f"/t/acme/projects/{project.pk}/"),
        "tenants": read(operator, "/operator/tenants/"),
        "tenant": read(operator, f"/operator/tenants/{acme.pk}/"),
    }


def test_the_cost_is_one_text(pages):
    month = f"{datetime.now(UTC):%B}"
    shown = {
        stat(pages["usage"], "Cost"),
        stat(pages["key"], "Spend this month"),
        stat(pages["project"], "Spend"),
        stat(pages["tenant"], f"Spend in {month}"),
        *cells(pages["overview"], "Spend"),
        *cells(pages["usage"], "Cost"),
        *cells(pages["keys"], "Cost"),
        *cells(pages["tenants"], "Spend"),
    }
    assert len(shown) == 1, shown
    assert re.fullmatch(r"\$\d+\.\d\d", shown.pop())


def test_requests_and_tokens_are_one_text(pages):
    accepted = {
        stat(pages["overview"], "Accepted requests"),
        stat(pages["usage"], "Accepted requests"),
        stat(pages["project"], "Accepted requests"),
        stat(pages["key"], "Accepted requests this month"),
        *cells(pages["usage"], "Accepted requests"),
        *cells(pages["tenants"], "Requests"),
    }
    assert accepted == {ACCEPTED}
    assert {stat(pages["key"], "Tokens this month"), *cells(pages["overview"], "Tokens")} == {TOKENS}
    assert stat(pages["usage"], "Input tokens") == INPUT
    assert f"{TOKENS} tokens" in text_of(pages["tenant"])


def test_rates_of_requests_are_one_text(pages):
    legend = dict(re.findall(r"</i>([^<]+) <b class=\"tabular\">([^<]+)</b>", pages["histogram"]))
    failed = {stat(pages["overview"], "Server error rate (5xx)"), stat(pages["log"], "Failed"), legend["Failed"]}
    assert failed == {"0.47%"}
    limited = {
        stat(pages["overview"], "Rate limited (429)"),
        stat(pages["log"], "Rate limited"),
        legend["Rate limited or rejected"],
    }
    assert limited == {"0.94%"}
    assert "0.94%" in text_of(pages["usage"])
