"""The usage page and its CSV: equal rows, for each group, with the same filters and all digits."""

from __future__ import annotations

import csv
import io
import re
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from billing.metering.usage import UsageReport, sums, total
from frontend.core.labels import REQUEST_COUNTS
from millrace.apps.answer_caches.models import WarmedPrompt
from millrace.apps.request_log.models import RequestRecord
from tenants import actions
from tenants.isolation.scopes import tenant_scope
from tenants.models import Tenant, User
from tests.support.billing import books
from tests.support.rows import only_project

pytestmark = [pytest.mark.django_db, pytest.mark.acme(signed_in="owner")]
GROUPS = ("model", "key", "project", "member", "tier", "route", "day")


@pytest.fixture
def acme(acme: Tenant, use) -> Tenant:
    """The tenant with usage, and with names that a spreadsheet would evaluate."""
    User.objects.filter(email="owner@example.com").update(name="=HYPERLINK(1)")
    project, version = only_project(acme), books.rate_card()
    for number, name in enumerate(("=1+1", " -2", "plain"), 1):
        key, _ = actions.do_create_api_key(project, name)
        counts = {"uncached": 1001 * number, "cache_read": 7 * number, "output": 13}
        use(acme, project_id=project.pk, key_id=key.pk, price_version=version, miss_reason="first_use", **counts)
    use(acme, key_id=key.pk, project_id=project.pk, model="other", uncached=5)
    return acme


def read(client, query: str) -> list[dict[str, str]]:
    response = client.get(f"/t/acme/usage/csv?{query}")
    assert response.status_code == 200
    assert response["Content-Type"].startswith("text/csv")
    return list(csv.DictReader(io.StringIO(response.content.decode())))


@pytest.mark.parametrize("group", GROUPS)
def test_each_group_adds_up_to_the_usage(client, acme, group):
    rows = read(client, f"group={group}")
    with tenant_scope(acme):
        counts = total(sums(UsageReport(acme.pk, start=datetime(2026, 1, 1, tzinfo=UTC))))
    for column, name in (("uncached_tokens", "uncached"), ("cached_tokens", "cache_read"), ("output_tokens", "output")):
        assert sum(int(row[column]) for row in rows) == counts[name] > 0
    assert sum(Decimal(row["cost_usd"]) for row in rows).scaleb(15) == counts["cost_femto"] > 0


def test_the_csv_has_the_pages_values(client, acme):
    page = client.get("/t/acme/usage/?group=key&model=smollm2-135m").content.decode()
    rows = read(client, "group=key&model=smollm2-135m")
    assert len(rows) == 3
    shown = re.search(r'id="panel-groups".*?</table>', page, re.S)
    assert shown
    for row in rows:
        assert f'value="{row["cost_usd"]}"' in shown[0]
        assert f"{int(row['uncached_tokens']):,}" in shown[0]
    assert "other" not in page.split('id="panel-groups"')[1].split("</table>")[0]
    assert 'href="/t/acme/usage/csv?group=key&amp;model=smollm2-135m"' in page


def test_names_in_the_csv_are_not_formulas(client, acme):
    names = {row["api_key"] for row in read(client, "group=key")}
    assert names == {"'=1+1", "' -2", "plain"}
    assert {row["member"] for row in read(client, "group=member")} == {"No member"}


def test_invalid_filters_in_the_url_are_ignored(client, acme):
    whole = read(client, "group=model")
    assert read(client, "group=;drop&key=x&project=-1&range=never") == whole
    assert read(client, "group=model&key=99999999999999999999999") == whole
    assert read(client, "group=model&key=999999") == []


def test_the_limits_that_rejected_requests_are_named(client, acme):
    bound = {"kind": "budget", "scope": "", "id": 4, "name": "All of it", "model": ""}
    with tenant_scope(acme):
        RequestRecord.objects.for_tenant(acme).bulk_create(
            RequestRecord(
                tenant_id=acme.pk,
                started_at=datetime.now(UTC),
                request_id=f"req_{number}",
                project_id=1,
                key_id=1,
                gateway_id="g",
                endpoint="chat.completions",
                requested_model="m",
                served_model="",
                stream=False,
                status="429",
                code="budget_exceeded",
                outcome="limited",
                limited_by=bound,
                total_ms=1,
            )
            for number in range(3)
        )
    page = client.get("/t/acme/usage/").content.decode()
    panel = page.split('id="panel-rejections"')[1]
    assert "budget All of it" in panel
    assert re.search(r'data-label="Rejected"><span class="tabular">3<', panel)
    assert "/t/acme/requests/?outcome=limited" in panel


def test_the_layers_show_what_cache_warming_spent_and_saved(client, acme):
    now = datetime.now(UTC)
    with tenant_scope(acme):
        RequestRecord.objects.create(
            tenant_id=acme.pk,
            started_at=now,
            request_id="req_1",
            project_id=1,
            key_id=1,
            gateway_id="gw",
            endpoint="chat.completions",
            requested_model="m",
            served_model="m",
            stream=False,
            status="200",
            code="",
            outcome="completed",
            total_ms=1,
            cache_layer="computed",
        )
    url = "/t/acme/usage/panels/layers"
    assert "Cache warming" not in client.get(url).content.decode()
    with tenant_scope(acme):
        for number, hits in enumerate((2, 0)):
            WarmedPrompt.objects.create(
                tenant_id=acme.pk,
                cache="answer",
                fingerprint=b"f",
                key_id=1,
                model="m",
                source_request_id="req_1",
                batch_id=1,
                batch_line=number,
                created_at=now,
                expires_at=now,
                expected_femto=1,
                max_femto=1,
                request_id=f"req_w{number}",
                cost_femto=10**15,
                hits=hits,
                saved_femto=3 * 10**15 if hits else 0,
            )
    text = re.sub(r"<[^>]+>", "", client.get(url).content.decode())
    shown = "prompts computed ahead: 2, for $2.00. Used prompts: 1. Requests that used them: 2. Saved: $3.00."
    assert f"Cache warming: {shown}" in text
    assert "Prompt cache in CPU memory" in text


def test_each_number_of_requests_is_named(client, acme, use):
    """Received, accepted and completed requests are different numbers, and each has its word and its definition."""
    use(acme, outcome="failed", finish_reason="error")
    for path in ("/t/acme/", "/t/acme/usage/"):
        page = client.get(path).content.decode()
        numbers = page.split('id="panel-stats"')[1].split("</dl>")[0]
        assert f'<span title="{REQUEST_COUNTS["accepted"]}">Accepted requests</span>' in numbers
        assert "<dt>Requests<" not in page and 'class="numeric">Requests<' not in page
        assert f'<span title="{REQUEST_COUNTS["received"]}">received' in page
    assert f'4</span> <span title="{REQUEST_COUNTS["completed"]}">completed</span>, ' in numbers
    assert '<span class="tabular">1</span> failed (not billed)' in numbers


def test_costs_of_a_column_have_the_same_number_of_decimals(client, acme):
    table = client.get("/t/acme/usage/?group=key").content.decode().split('id="panel-groups"')[1].split("</table>")[0]
    for label in ("Cost", "Saved"):
        cells = re.findall(rf'data-label="{label}">(?:<b>)?<data[^>]*>[^<]+<span class="cents">([^<]+)<', table)
        assert len(cells) == 4
        assert len({len(cents) for cents in cells}) == 1, cells


def test_batch_usage_without_a_job_is_not_called_none_yet(client, acme, use):
    assert "No batch jobs yet" in client.get("/t/acme/").content.decode()
    use(acme, price_version=books.rate_card(tier="batch"), uncached=10)
    page = client.get("/t/acme/").content.decode()
    assert "No batch jobs yet" not in page
    assert "Batch jobs used" in page and "Their jobs were deleted. Usage is kept." in page


def test_the_page_loads_without_request_records(client, acme):
    """The route is in the request's record. Without a record, the usage still counts."""
    rows = read(client, "group=route")
    assert {row["route"] for row in rows} == {"smollm2-135m", "other"}
    assert all("record" in row["detail"] for row in rows)


def test_usage_by_route_is_loaded_after_the_page(client, acme):
    """It reads each request of the period."""
    page = client.get("/t/acme/usage/?group=route").content.decode()
    found = re.search(r'id="panel-groups" hx-get="([^"]+)" hx-trigger="load, every 30s"', page)
    assert found
    assert "Request record no longer available" not in page
    assert "Request record no longer available" in client.get(found[1]).content.decode()
    assert 'id="panel-groups" hx-get="/t/acme/usage/panels/groups?group=model" hx-trigger="every' in (
        client.get("/t/acme/usage/?group=model").content.decode()
    )


def test_the_cost_per_success_is_shown_and_exported(client, acme, use):
    now = datetime.now(UTC)
    made = {"project_id": 1, "gateway_id": "g", "endpoint": "chat.completions", "requested_model": "m", "code": ""}
    made |= {"served_model": "=cmd", "stream": False, "status": "200", "total_ms": 1, "started_at": now, "key_id": 1}
    with tenant_scope(acme):
        RequestRecord.objects.for_tenant(acme).bulk_create(
            RequestRecord(tenant_id=acme.pk, request_id=f"req_{number}", outcome=outcome, end_user="ann", **made)
            for number, outcome in enumerate(("completed", "completed", "cancelled", "limited"))
        )
    version = books.rate_card("priced")
    for number in range(3):
        use(acme, request_id=f"req_{number}", at=now, uncached=1000, model="priced", price_version=version)
    panel = client.get("/t/acme/usage/panels/success?success_by=end_user").content.decode()
    assert re.search(r"66\.7% of <span[^>]*>3</span> requests succeeded", panel)
    assert re.search(r"ann</th>.*?aborted: 1", panel, re.S)
    rows = list(
        csv.DictReader(io.StringIO(client.get("/t/acme/usage/success.csv?success_by=end_user").content.decode()))
    )
    assert [(row["end_user"], row["requests"], row["succeeded"], row["cancelled"]) for row in rows] == [
        ("ann", "3", "2", "1")
    ]
    cost, per_success = (Decimal(rows[0][name]) for name in ("cost_usd", "cost_per_success_usd"))
    assert cost == per_success * 2 > 0
    models = client.get("/t/acme/usage/success.csv?success_by=;drop").content.decode()
    assert models.startswith("model,") and "'=cmd" in models  # an invalid group is ignored; no formulas
    for group in ("policy", "cache_layer", "key"):
        assert client.get(f"/t/acme/usage/panels/success?success_by={group}").status_code == 200
