"""The cost explorer: equal figures on the page and in its CSV, comparison, filters, states and saved views."""

from __future__ import annotations

import csv
import io
import re
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from billing.metering import end_users, rollups
from billing.metering.usage import UsageReport, sums, total
from billing.models import RollupState, UsageRollup
from frontend.core.charts import Chart
from frontend.core.numbers import share
from frontend.tenant.usage import explorer
from inference_worker.contract.request import TOKEN_CLASSES
from millrace.apps.request_log import cost_segments
from millrace.apps.request_log.models import RequestRecord
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.jobs import run_jobs
from tenants.models import ApiKey, SavedView, Tenant, TenantJob, User
from tests.support.billing import books
from tests.support.rows import only_project

pytestmark = [pytest.mark.django_db, pytest.mark.acme(signed_in="owner")]
URL = "/t/acme/usage/explorer/"
NOW = datetime.now(UTC)
TODAY = NOW.replace(hour=0, minute=0, second=0, microsecond=0)
DAY = timedelta(days=1)
PEOPLE = ("ann", "bob", "")
TOTALS = {
    "cost_usd": lambda counts: Decimal(counts["cost_femto"]).scaleb(-15),
    "tokens": lambda counts: sum(counts[name] for name in TOKEN_CLASSES),
    "requests": lambda counts: counts["completed"] + counts["cancelled"] + counts["failed"],
}


@pytest.fixture
def acme(acme: Tenant, use: Any) -> Tenant:
    """The tenant, created 100 days ago, with usage of today and of 8 days ago by three keys."""
    owner = User.objects.get(email="owner@example.com")
    User.objects.filter(pk=owner.pk).update(name="=HYPERLINK(1)")
    project, version = only_project(acme), books.rate_card()
    age(acme, 100)
    for number, name in enumerate(("=1+1", "second", "third"), 1):
        key, _ = actions.do_create_api_key(project, name, created_by=owner if number > 1 else None)
        common = {"project_id": project.pk, "key_id": key.pk, "end_user": PEOPLE[number - 1]}
        for at, size in ((NOW, 3), (NOW - 8 * DAY, 1)):
            use(acme, at=at, price_version=version, uncached=1000 * number * size, output=13, **common)
    return acme


def age(tenant: Tenant, days: int) -> None:
    with all_tenants_scope(BypassReason.COMMAND):
        Tenant.objects.all_tenants().filter(pk=tenant.pk).update(created_at=NOW - days * DAY)


def read(client: Any, query: str) -> list[dict[str, str]]:
    response = client.get(f"{URL}csv?{query}")
    assert response.status_code == 200
    assert response["Content-Type"].startswith("text/csv")
    return list(csv.DictReader(io.StringIO(response.content.decode())))


def page_of(client: Any, query: str = "") -> str:
    response = client.get(f"{URL}?{query}")
    assert response.status_code == 200
    text: str = response.content.decode()
    assert "panel-error" not in text
    return text


def table_of(client: Any, query: str) -> list[list[str]]:
    """Return the texts of the table's cells, without the header."""
    page = page_of(client, query)
    table = page.split('aria-label="Segments"')[1].split("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.S)[1:]
    return [
        [
            " ".join(re.sub(r"<[^>]+>", " ", cell).split())
            for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)
        ]
        for row in rows
    ]


@pytest.mark.parametrize("group", ["model", "key", "project", "member", "end_user"])
@pytest.mark.parametrize(("measure", "column"), [("cost", "cost_usd"), ("tokens", "tokens"), ("requests", "requests")])
def test_each_measure_adds_up_in_each_grouping(client, acme, measure, column, group):
    rows = read(client, f"measure={measure}&group={group}&range=30d")
    with tenant_scope(acme):
        counts = total(sums(UsageReport(acme.pk, start=TODAY - 29 * DAY)))
    whole = TOTALS[column](counts)
    assert sum(Decimal(row[column]) for row in rows) == whole > 0
    days = [f"{(TODAY - number * DAY).date()}" for number in range(30)]
    assert sum(Decimal(row[day]) for row in rows for day in days) == whole
    assert len(table_of(client, f"measure={measure}&group={group}&range=30d")) == len(rows) + 1


def test_segments_are_ordered_and_named(client, acme):
    rows = table_of(client, "group=key&range=7d")
    assert [row[0].split(" sk-")[0] for row in rows] == ["third", "second", "=1+1", "All"]
    assert sum(float(row[2].rstrip("%")) for row in rows[:3]) == pytest.approx(100, abs=0.2)
    assert [row["key"] for row in read(client, "group=key&range=7d")] == ["third", "second", "'=1+1"]
    assert [row["member"] for row in read(client, "group=member&range=7d")] == ["'=HYPERLINK(1)", ""]
    assert [row[0] for row in table_of(client, "group=end_user&range=7d")] == [
        "Without an end user", "bob", "ann", "All"
    ]  # fmt: skip


def test_the_previous_period_is_compared(client, acme):
    """8 days ago a third of each key's input was used. The last 7 days are compared with the 7 days before."""
    model, _whole = table_of(client, "measure=requests&range=7d")
    assert (model[1], model[3]) == ("3", "3")
    model, _whole = table_of(client, "measure=tokens&range=7d")
    now, then = 3 * 6000 + 3 * 13, 6000 + 3 * 13
    assert model[4] == f"up {share(now - then, then)}"
    chart = page_of(client, "range=7d").split('id="chart-explorer"')[1]
    assert '"style": "dash"' in chart.split("</script>")[0]
    off = page_of(client, "range=7d&compare=off")
    assert '"style": "dash"' not in off and "Previous period" not in off
    assert table_of(client, "group=key&range=24h&measure=requests")[0][4] == "New"


def test_the_ten_largest_segments_are_shown_and_the_others_together(client, acme, use):
    for number in range(12):
        use(acme, model=f"model-{number:02}", uncached=10_000 * (number + 1), price_version=None)
    rows = table_of(client, "measure=tokens&range=7d")
    assert [row[0] for row in rows] == [*(f"model-{number:02}" for number in range(11, 1, -1)), "Others (3)", "All"]
    assert len(read(client, "measure=tokens&range=7d")) == 13
    assert sum(int(row["tokens"]) for row in read(client, "measure=tokens&range=7d")) == int(
        re.sub(
            r"\D", "", page_of(client, "measure=tokens&range=7d").split("<tfoot>")[1].split('value="')[1].split('"')[0]
        )
    )


def test_a_segment_filters_and_its_requests_have_the_same_filters(client, acme):
    page = page_of(client, "group=member&range=7d&model=smollm2-135m&measure=tokens")
    owner = User.objects.get(email="owner@example.com").pk
    link = re.search(r'<a href="([^"]+)" data-segment="0" data-requests="([^"]+)"', page)
    assert link
    narrowed, requests = (text.replace("&amp;", "&") for text in link.groups())
    assert narrowed == f"{URL}?group=key&range=7d&model=smollm2-135m&measure=tokens&member={owner}"
    assert requests == f"/t/acme/requests/?range=7d&model=smollm2-135m&member={owner}"
    rows = table_of(client, narrowed.split("?")[1])
    assert [row[0].split(" sk-")[0] for row in rows] == ["third", "second", "All"]
    assert client.get(requests).status_code == 200
    page = page_of(client, "group=end_user&range=12w")
    assert re.search(
        r'data-requests="/t/acme/requests/\?range=custom&amp;from=[\d-]+&amp;to=[\d-]+&amp;user=bob"', page
    )
    assert f"{URL}?range=12w&amp;user=bob" in page


def test_the_request_log_is_filtered_by_member_and_end_user(client, acme):
    with tenant_scope(acme):
        keys = {key.name: key.pk for key in ApiKey.objects.for_tenant(acme)}
        for name, key in keys.items():
            log(acme, f"req_{name.strip('=')}", key_id=key, end_user=name)
    owner = User.objects.get(email="owner@example.com").pk
    shown = client.get(f"/t/acme/requests/?member={owner}").content.decode()
    assert "req_second" in shown and "req_third" in shown and "req_1+1" not in shown
    shown = client.get("/t/acme/requests/?user=third").content.decode()
    assert "req_third" in shown and "req_second" not in shown


def log(tenant: Tenant, name: str, **fields: Any) -> None:
    made = {"project_id": 1, "key_id": 1, "gateway_id": "g", "endpoint": "chat.completions", "requested_model": "m"}
    made |= {"served_model": "smollm2-135m", "stream": False, "status": "200", "code": "", "outcome": "completed"}
    RequestRecord.objects.create(tenant_id=tenant.pk, request_id=name, started_at=NOW, total_ms=1, **made | fields)


def test_the_cost_per_success_is_that_of_the_log(client, acme, use):
    version = books.rate_card("priced")
    for number, outcome in enumerate(("completed", "completed", "cancelled")):
        use(acme, request_id=f"req_{number}", at=NOW, uncached=1000, model="priced", price_version=version)
        with tenant_scope(acme):
            log(acme, f"req_{number}", served_model="priced", outcome=outcome, end_user=f"user-{number % 2}")
    (row,) = read(client, "measure=success&range=7d")
    with tenant_scope(acme):
        (counts,) = sums(UsageReport(acme.pk, start=TODAY, model="priced"))
    cost = Decimal(counts["cost_femto"]).scaleb(-15)
    assert (row["model"], Decimal(row["cost_per_success_usd"])) == ("priced", cost / 2)
    assert Decimal(row[f"{TODAY.date()}"]) == cost / 2 and row[f"{(TODAY - DAY).date()}"] == ""
    by_user = {
        row["id"]: row["cost_per_success_usd"] for row in read(client, "measure=success&group=end_user&range=7d")
    }
    assert {name: Decimal(value or 0) for name, value in by_user.items()} == {
        "user-0": cost / 3 * 2,
        "user-1": cost / 3,
    }
    page = page_of(client, "measure=success&group=key&range=7d")
    assert 'hx-trigger="load' in page  # it reads each request
    assert 'hx-trigger="load' not in page_of(client, "measure=success&range=7d")


def test_weeks_start_on_monday_and_add_up(client, acme):
    rows = read(client, "measure=requests&range=12w&step=week&group=key")
    weeks = [name for name in rows[0] if re.fullmatch(r"\d{4}-\d\d-\d\d", name)]
    assert len(weeks) == 12 and all(date.fromisoformat(week).weekday() == 0 for week in weeks)
    assert sum(int(row[week]) for row in rows for week in weeks) == 6
    page = page_of(client, "range=12w")
    assert ">Daily</a>" not in page and ">Weekly</a>" in page  # 84 days are too many for one chart
    assert page_of(client, "range=30d").count(">Daily</a>") == 1


def test_the_query_string_is_the_view(client, acme):
    query = "measure=tokens&group=key&step=week&range=30d&model=smollm2-135m&compare=off"
    page = page_of(client, query)
    for label in ("Tokens", "API key", "Weekly"):
        assert re.search(rf'aria-current="true">{label}</a>', page), label
    assert 'href="/t/acme/usage/explorer/?measure=requests&amp;group=key&amp;step=week&amp;range=30d' in page
    invalid = page_of(client, "measure=;drop&group=none&step=year&range=never&key=-1&member=x&project=9" + "9" * 30)
    assert re.search(r'aria-current="true">Cost</a>', invalid)


def test_views_are_saved_per_user(client, acme):
    client.post(f"{URL}views/save", {"name": "Tokens of keys", "query": "measure=tokens&group=key&range=7d"})
    with tenant_scope(acme):
        (row,) = SavedView.objects.for_tenant(acme)
    assert (row.screen, row.query) == ("usage-explorer", "measure=tokens&group=key")
    page = page_of(client, "measure=tokens&group=key")
    assert re.search(r'<a href="[^"]+" aria-current="page">Tokens of keys</a>', page)
    client.post(f"{URL}views/delete", {"view": row.pk})
    assert "Tokens of keys" not in page_of(client)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("range=custom&from=2026-01-01&to=2026-01-31", "was created on"),
        ("range=7d&model=none", "Choose another period or clear the filters."),
        ("measure=success&range=7d&model=none", "Choose another period or clear the filters."),
        ("range=custom&from=2026-02-30&to=x", "Enter both dates as YYYY-MM-DD."),
        ("range=custom&from=2001-01-01&to=2026-01-31", "Choose a range of one year or less."),
    ],
)
def test_each_state_without_data_has_its_text(client, acme, query, text):
    assert text in page_of(client, query)
    assert client.get(f"{URL}csv?{query}").status_code == 200


def test_a_measure_without_data_is_named(client, acme, use):
    use(acme, model="free", uncached=1000)
    assert "all values of this measure are 0" in page_of(client, "model=free")
    with tenant_scope(acme):
        log(acme, "req_failed", outcome="failed", served_model="free")
    assert "No request of this period was successful and billed." in page_of(client, "measure=success&model=free")


def test_too_many_sums_of_the_log_are_a_state(client, acme, monkeypatch):
    with tenant_scope(acme):
        log(acme, "req_1")
    monkeypatch.setattr(cost_segments, "MAX_CELLS", 0)
    assert "Choose a shorter period or add filters." in page_of(client, "measure=success")
    assert client.get(f"{URL}csv?measure=success").status_code == 422


def test_end_users_without_rows_of_their_own_are_others(client, acme, use, monkeypatch):
    monkeypatch.setattr(end_users, "MAX_END_USERS", 1)
    monkeypatch.setattr(end_users, "MARGIN", timedelta(0))
    monkeypatch.setattr(rollups, "MARGIN", timedelta(0))
    with tenant_scope(acme):
        key = ApiKey.objects.for_tenant(acme).get(name="third").pk
    for number in range(3):
        use(acme, at=NOW, key_id=key, end_user=f"user-{number}", uncached=100)
    rollups.build()
    end_users.build_end_users()
    rows = read(client, "measure=requests&group=end_user&range=7d")
    assert {row["end_user"] or row["id"]: row["requests"] for row in rows} == {
        **{"": "1", "ann": "1", "bob": "1", "user-0": "1", "others": "2"}
    }
    assert "Others" in [row[0] for row in table_of(client, "measure=requests&group=end_user&range=7d")]


def test_ten_thousand_keys_are_ten_and_others(client, acme):
    with all_tenants_scope(BypassReason.COMMAND):
        RollupState.objects.create(settled_before=NOW + DAY, totals_before=NOW + DAY, coarse_before=NOW + DAY)
        counts = dict.fromkeys((*TOKEN_CLASSES, "answer_hit_input", "answer_hit_output", "unpinned_tokens"), 0)
        counts |= dict.fromkeys(("cancelled", "failed", "saved_femto"), 0)
        UsageRollup.objects.all_tenants().bulk_create(
            UsageRollup(
                tenant_id=acme.pk,
                bucket="kdays",
                start=TODAY - 3 * DAY,
                project_id=1,
                key_id=10**6 + number,
                model="",
                tier="",
                miss_reason="",
                completed=1,
                cost_femto=10**15 + number,
                **counts,
            )
            for number in range(10_000)
        )
    rows = table_of(client, "group=key&range=7d")
    assert len(rows) == 12
    assert rows[0][0] == "Key 1009999, deleted" and rows[10][0] == "Others (9,990)"
    page = page_of(client, "group=key&range=7d")
    assert len(page) < 60_000
    assert client.get(f"{URL}csv?group=key&range=7d").status_code == 422  # a job writes it
    form = re.search(r'method="post" action="(/t/acme/usage/explorer/exports[^"]+)"', page)
    assert form
    assert "being prepared" in client.post(form[1].replace("&amp;", "&"), follow=True).content.decode()
    assert "In preparation" in page_of(client)
    assert run_jobs() == 1
    link = re.search(r'href="(/t/acme/usage/explorer/exports/\d+)"', page_of(client))
    assert link
    file = client.get(link[1])
    rows = list(csv.DictReader(io.StringIO(file.content.decode())))
    assert "cost-acme-by-key-" in file["Content-Disposition"]
    assert len(rows) == 10_000 and rows[0]["id"] == "1009999"
    other = actions.do_create_tenant("other", "Other")
    actions.do_add_member(other, User.objects.get(email="owner@example.com"), "owner")
    assert client.get(link[1].replace("/t/acme/", "/t/other/")).status_code == 404


def test_an_export_that_fails_says_why(client, acme, monkeypatch):
    with tenant_scope(acme):
        log(acme, "req_1")
    assert client.get(f"{URL}exports").status_code == 405
    client.post(f"{URL}exports?measure=success")
    monkeypatch.setattr(cost_segments, "MAX_CELLS", 0)
    assert run_jobs() == 1
    page = page_of(client)
    assert "Failed" in page and "The export would have too many rows. Choose a shorter period." in page
    with tenant_scope(acme):
        job = TenantJob.objects.for_tenant(acme).get()
    assert client.get(f"{URL}exports/{job.pk}").status_code == 404
    for _ in range(4):
        response = client.post(f"{URL}exports?range=7d", follow=True)
    assert "jobs are unfinished" in response.content.decode()


def test_other_tenants_and_roles_see_nothing(client, acme):
    other = actions.do_create_tenant("other", "Other")
    assert client.get(f"/t/{other.slug}/usage/explorer/").status_code == 404
    assert client.get(f"/t/{other.slug}/usage/explorer/csv").status_code == 404


def test_names_of_any_script_are_escaped(client, acme, use):
    name = "<b>ünïcode</b> 名前 שלום "
    use(acme, end_user=name * 5, uncached=10)
    page = page_of(client, "group=end_user&measure=tokens")
    assert "<b>ünïcode</b>" not in page and "&lt;b&gt;ünïcode&lt;/b&gt; 名前 שלום" in page


def test_the_chart_has_the_tables_values(acme, client, monkeypatch):
    charts: list[Chart] = []
    monkeypatch.setattr(explorer, "Chart", lambda *args, **fields: charts.append(Chart(*args, **fields)) or charts[-1])
    page_of(client, "group=key&range=30d&measure=tokens")
    (chart,) = charts
    rows = read(client, "group=key&range=30d&measure=tokens")
    assert [sum(value or 0 for value in series.values) for series in chart.series[:3]] == [
        int(row["tokens"]) for row in rows
    ]
    assert chart.series[-1].style == "dash" and len(chart.at) == 30
