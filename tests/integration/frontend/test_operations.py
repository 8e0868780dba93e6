"""The operators' pages of workers, quarantine, costs and the audit log, which no other user can see."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from django.test import Client

from billing.budgets.budgets import do_change_budget, do_make_budget
from billing.models import UsageQuarantine
from inference_worker.contract.messages import CORDONS_KEY, REPLICAS_KEY, SUPPORT_KEY
from inference_worker.contract.unsettled_usage import UNSETTLED_KEY
from millrace.apps.deployments.fleet_status import read_fleet_status
from millrace.apps.health import history
from millrace.apps.health.models import Cordon, HealthEvent, MachineCost
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, User
from tests.support.deployments.heartbeats import register_worker
from tests.support.frontend.console import remembered
from tests.support.frontend.screens.operator_health import leave_usage, speak
from tests.support.rows import only_project, unscoped

pytestmark = pytest.mark.django_db(transaction=True)
PAGES = (
    "/operator/",
    "/operator/models/",
    "/operator/fleet/",
    "/operator/alerts/",
    "/operator/alerts/?show=budgets",
    "/operator/audit/",
)
ACTIONS = (
    *("/operator/models/m-0/cordon", "/operator/models/m-0/drain", "/operator/models/m-0/uncordon"),
    *(
        "/operator/fleet/costs/smollm2-135m",
        "/operator/quarantine/1/replay",
        "/operator/quarantine/1/dismiss",
        "/operator/left-usage/journal/dismiss",
        "/operator/audit/1",
    ),
)


@pytest.fixture
def broker() -> Iterator[redis.Redis]:
    with redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"]) as client:
        client.flushdb()
        yield client


@pytest.fixture
def operator(client: Client) -> User:
    user = User.objects.create_superuser("op@example.com")
    client.force_login(user)
    return user


@pytest.fixture
def aside() -> UsageQuarantine:
    with all_tenants_scope(BypassReason.COMMAND):
        return UsageQuarantine.objects.create(
            received_at=datetime.now(UTC),
            stream_id="1-0",
            reason="undecodable",
            detail="no",
            payload=b"\xc1",
            payload_hash=hashlib.sha256(b"\xc1").digest(),
        )


def audited(verb: str) -> AuditEntry:
    (entry,) = unscoped(AuditEntry).filter(action=verb)
    return entry


@pytest.mark.usefixtures("broker")
def test_other_users_get_404(client: Client, aside: UsageQuarantine) -> None:
    owner = User.objects.create_user("owner@example.com")
    actions.do_add_member(actions.do_create_tenant("acme", "Acme"), owner, "owner")
    for address in (*PAGES, *ACTIONS):
        assert client.get(address).status_code == 302, address  # redirected to the login
    client.force_login(owner)
    remembered(client.session)
    for address in (
        *PAGES,
        *ACTIONS,
        "/operator/panels/health",
        "/operator/models/panels/replicas",
        "/operator/audit/panels/entries",
    ):
        assert client.get(address).status_code == 404, address
        assert client.post(address, {"typed": "m-0", "reason": "x", "amount": "1"}).status_code == 404, address
    assert unscoped(Cordon).count() == unscoped(MachineCost).count() == 0
    assert unscoped(UsageQuarantine).get().resolved_at is None


@pytest.mark.usefixtures("operator")
def test_every_page_loads_without_data(client: Client, broker: redis.Redis) -> None:
    for address in PAGES:
        response = client.get(address)
        assert response.status_code == 200, address
        assert "did not load" not in response.content.decode(), address


@pytest.mark.usefixtures("operator")
def test_every_page_loads_without_the_broker(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise redis.ConnectionError

    for module in ("health", "models", "fleet"):
        monkeypatch.setattr(f"frontend.operator.{module}.page.read_fleet_status", away)
    for address in PAGES:
        assert "did not load" not in client.get(address).content.decode(), address
    assert "Broker unavailable" in client.get("/operator/").content.decode()


@pytest.mark.usefixtures("operator")
def test_a_worker_is_cordoned_drained_and_uncordoned(client: Client, broker: redis.Redis) -> None:
    speak(broker, "smollm2-135m-0.aa", "smollm2-135m", running=3)
    address = "/operator/models/smollm2-135m-0"
    page = client.get(f"{address}/cordon").content.decode()
    assert "No other replica serves smollm2-135m" in page
    speak(broker, "smollm2-135m-1.bb", "smollm2-135m", running=0)
    assert "1 other replica of smollm2-135m" in client.get(f"{address}/drain").content.decode()
    assert client.post(f"{address}/cordon", {"reason": "x" * 201}).status_code == 422
    assert unscoped(Cordon).count() == 0
    response = client.post(f"{address}/cordon", {"reason": "new disk"})
    assert (response.status_code, response["Location"]) == (303, "/operator/models/")
    assert broker.hgetall(CORDONS_KEY) == {b"smollm2-135m-0": b"cordon"}
    entry = audited("worker.cordoned")
    assert (entry.actor, entry.object_name, entry.after["reason"]) == ("op@example.com", "smollm2-135m-0", "new disk")
    shown = client.get("/operator/models/").content.decode()
    assert "Cordoned" in shown
    assert "new disk" in shown
    assert client.post(f"{address}/cordon").status_code == 422  # it is already in this state
    assert client.post(f"{address}/drain").status_code == 303
    assert broker.hgetall(CORDONS_KEY) == {b"smollm2-135m-0": b"drain"}
    broker.hdel(REPLICAS_KEY, "smollm2-135m-0.aa")
    assert "smollm2-135m-0 is not running" in client.get("/operator/models/").content.decode()
    assert client.post(f"{address}/uncordon").status_code == 303
    assert not broker.exists(CORDONS_KEY)
    assert client.post(f"{address}/uncordon").status_code == 404
    assert client.post("/operator/models/unknown/cordon").status_code == 404


@pytest.mark.usefixtures("operator", "broker")
def test_actions_on_quarantined_events_require_reauthentication(client: Client, aside: UsageQuarantine) -> None:
    address = f"/operator/quarantine/{aside.pk}"
    assert client.post(f"{address}/dismiss", {"reason": "a stray script"}).status_code == 302
    assert unscoped(UsageQuarantine).get().resolved_at is None
    remembered(client.session)
    assert client.post(f"{address}/dismiss", {"reason": ""}).status_code == 422
    response = client.post(f"{address}/replay")
    assert response.status_code == 422
    assert "still cannot be settled" in response.content.decode()
    assert "undecodable" in client.get("/operator/").content.decode()
    assert client.post(f"{address}/dismiss", {"reason": "a stray script"}).status_code == 303
    assert unscoped(UsageQuarantine).get().resolved_at is not None
    assert audited("quarantine.dismissed").after["why"] == "a stray script"
    assert "Quarantine is empty" in client.get("/operator/").content.decode()


@pytest.mark.usefixtures("operator")
def test_usage_of_a_lost_worker_is_dismissed_after_a_reauthentication(client: Client, broker: redis.Redis) -> None:
    leave_usage(broker, tenant_id=1)
    address = "/operator/left-usage/journal/dismiss"
    assert f'href="{address}"' in client.get("/operator/").content.decode()
    assert client.post(address, {"reason": "the disk is lost"}).status_code == 302
    assert broker.hexists(UNSETTLED_KEY, "journal")
    remembered(client.session)
    page = client.get(address).content.decode()
    assert "Dismiss the usage of smollm2-135m-2" in page
    assert "rack-7" in page
    assert client.post(address, {"reason": " "}).status_code == 422
    response = client.post(address, {"reason": "the disk is lost"})
    assert (response.status_code, response["Location"]) == (303, "/operator/")
    assert not broker.exists(UNSETTLED_KEY)
    entry = audited("unsettled_usage.dismissed")
    assert (entry.actor, entry.object_name) == ("op@example.com", "smollm2-135m-2 (rack-7)")
    assert entry.after == {"why": "the disk is lost"}
    page = client.get(f"/operator/audit/{entry.pk}").content.decode()
    assert "Unsettled usage dismissed" in page
    assert address not in client.get("/operator/").content.decode()
    assert client.post(address, {"reason": "again"}).status_code == 404


@pytest.mark.usefixtures("operator", "broker")
def test_the_cost_of_a_machine_is_set(client: Client) -> None:
    for wrong in ("", "much", "-1", "0.0000000001", "1e30"):
        assert client.post("/operator/fleet/costs/smollm2-135m", {"amount": wrong}).status_code == 422, wrong
    assert client.post("/operator/fleet/costs/smollm2-135m", {"amount": "$0.40"}).status_code == 303
    assert unscoped(MachineCost).get().nano_per_hour == 400_000_000
    assert audited("machine_cost.updated").after == {"model": "smollm2-135m", "nano_per_hour": 400_000_000}
    assert client.get("/operator/fleet/costs/gpt-9").status_code == 404


@pytest.mark.usefixtures("operator", "broker")
def test_the_log_is_filtered_and_paged_by_key(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.core.audit_log.PAGE_SIZE", 3)
    acme, lab = actions.do_create_tenant("acme", "Acme"), actions.do_create_tenant("lab", "Lab")
    for number in range(7):
        actions.do_create_api_key(only_project(acme), f"key {number}")
    actions.do_create_api_key(only_project(lab), "of the lab")

    def names(address: str) -> tuple[list[str], str]:
        page = client.get(address).content.decode()
        assert "panel-error" not in page
        return re.findall(r'</a><span class="text-muted">([^<]+)</span></th>', page), page

    def link(page: str, rel: str) -> str:
        (found,) = re.findall(rf'rel="{rel}" href="([^"]+)"', page)
        return str(found).replace("&amp;", "&")

    first, page = names("/operator/audit/?tenant=acme&action=key")
    assert [name[:5] for name in first] == ["key 6", "key 5", "key 4"]
    assert 'rel="prev"' not in page
    actions.do_create_api_key(only_project(acme), "key 7")  # does not shift the next page
    second, page = names(link(page, "next"))
    assert [name[:5] for name in second] == ["key 3", "key 2", "key 1"]
    third, last = names(link(page, "next"))
    assert [name[:5] for name in third] == ["key 0"]
    assert 'rel="next"' not in last
    back, page = names(link(page, "prev"))
    assert [name[:5] for name in back] == ["key 6", "key 5", "key 4"]
    newest, page = names(link(page, "prev"))
    assert [name[:5] for name in newest] == ["key 7"]
    assert names("/operator/audit/?tenant=lab&action=key")[0] == [newest_of(lab)]
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).date()
    assert names(f"/operator/audit/?from={tomorrow}")[0] == []
    today = f"from={tomorrow - timedelta(days=2)}&to={tomorrow}"
    assert names(f"/operator/audit/?tenant=lab&action=key&{today}")[0] == [newest_of(lab)]
    for nonsense in ("from=yesterday", "before=99999999999999999999", "after=-1"):
        assert client.get(f"/operator/audit/?{nonsense}").status_code == 200, nonsense


@pytest.mark.usefixtures("operator", "broker")
def test_entries_are_in_words_with_units_and_names(client: Client) -> None:
    tenant = actions.do_create_tenant("acme", "Acme")
    key, _ = actions.do_create_api_key(only_project(tenant), "prod")
    budget = do_make_budget(tenant, name="Cap", unit="money", period="month", amount=500 * 10**9, key=key)
    do_change_budget(budget, amount=750 * 10**9 + 1)
    client.post("/operator/fleet/costs/smollm2-135m", {"amount": "0.50"})
    page = client.get("/operator/audit/").content.decode()
    assert "Budget created" in page and "API key created" in page and "Organization created" in page
    assert "<del>$500.00</del>" in page and "<ins>$750.000000001</ins>" in page
    assert "Cost per hour</span>  <ins>$0.50/h</ins>" in page
    entry = audited("budget.created")
    page = client.get(f"/operator/audit/{entry.pk}").content.decode()
    assert "<td" in page and "<ins>prod</ins>" in page and "<ins>50, 80, 100 %</ins>" in page


@pytest.mark.usefixtures("operator", "broker")
def test_entries_are_exported_with_the_filters(client: Client) -> None:
    tenant = actions.do_create_tenant("acme", "Acme")
    actions.do_create_api_key(only_project(tenant), "=cmd")
    rows = client.get("/operator/audit/export?format=json&tenant=acme&action=key.").json()
    assert [(row["action"], row["resource"][:4]) for row in rows] == [("key.created", "=cmd")]
    assert "Name: – → =cmd" in rows[0]["changes"]
    text = client.get("/operator/audit/export?tenant=acme").content.decode()
    assert text.startswith("time,actor,") and "\n=cmd" not in text
    assert "action=key." in client.get("/operator/audit/?action=key.").content.decode()


def newest_of(tenant: Any) -> str:
    return str(unscoped(AuditEntry).filter(tenant_id=tenant.pk)[0].object_name)


@pytest.mark.usefixtures("operator", "broker")
def test_an_entry_shows_values_before_and_after(client: Client) -> None:
    tenant = actions.do_create_tenant("acme", "Acme")
    actions.do_update_tenant(tenant, name="<b>Acme</b> Ltd")
    entry = audited("tenant.updated")
    page = client.get(f"/operator/audit/{entry.pk}").content.decode()
    assert "<del>Acme</del>" in page
    assert "<ins>&lt;b&gt;Acme&lt;/b&gt; Ltd</ins>" in page
    assert client.get("/operator/audit/999999").status_code == 404


@pytest.mark.usefixtures("operator", "broker")
def test_alerts_show_open_and_resolved_issues(client: Client, use: Callable[..., str]) -> None:
    now = datetime.now(UTC)
    with all_tenants_scope(BypassReason.COMMAND):
        given = {"issue_type": "settler", "urgent": True, "opened_at": now - timedelta(hours=2)}
        HealthEvent.objects.create(subject="", title="No settler running", closed_at=now, **given)
        HealthEvent.objects.create(subject="1", title="Another thing", **given)
    both, only = (client.get(f"/operator/alerts/{query}").content.decode() for query in ("", "?state=open"))
    assert "No settler running" in both
    assert "Another thing" in both
    assert "No settler running" not in only
    assert "Another thing" in only


@pytest.mark.usefixtures("operator")
def test_workers_of_one_name_have_rows_of_their_own(client: Client, broker: redis.Redis) -> None:
    now = datetime.now(UTC)
    for minutes in (3, 2):
        for suffix, host, running in (("aa", "left", 21), ("bb", "right", 27)):
            speak(broker, f"smollm2-135m-0.{suffix}", "smollm2-135m", running=running)  # a third of them waits
            register_worker(broker, f"smollm2-135m-0.{suffix}", host)
        history.sample(read_fleet_status(), now - timedelta(minutes=minutes))
    page = client.get("/operator/fleet/?span=1h").content.decode()
    rows = re.findall(r'<th scope="row">smollm2-135m-0 · (\w+)<.*?data-label="Queue now">(\d+)<', page, re.DOTALL)
    assert rows == [("left", "7"), ("right", "9")]
    register_worker(broker, "smollm2-135m-0.bb", "left")
    page = client.get("/operator/fleet/?span=1h").content.decode()
    assert re.findall(r'<th scope="row">(smollm2-135m-0[^<]*)<', page) == ["smollm2-135m-0.aa", "smollm2-135m-0.bb"]
    broker.hdel(SUPPORT_KEY, "smollm2-135m-0.bb")
    page = client.get("/operator/fleet/?span=1h").content.decode()
    assert re.findall(r'<th scope="row">(smollm2-135m-0[^<]*)<', page) == ["smollm2-135m-0"]


@pytest.mark.usefixtures("operator")
def test_a_model_is_found_by_its_name(client: Client) -> None:
    page = client.get("/operator/search?q=MiniLM").content.decode()
    assert "/operator/fleet/?model=all-minilm-l6-v2" in page
    assert "smollm2" not in page
