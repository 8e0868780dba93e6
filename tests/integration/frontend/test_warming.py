"""Cache warming in the console: candidates with their costs, runs of selected ones, every state, and permissions."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import Mock

import pytest

from millrace.apps.answer_caches.models import WarmedPrompt
from millrace.apps.answer_caches.warming_candidates import digest_history
from millrace.apps.request_log.models import RequestContent, RequestRecord
from tenants import actions
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.jobs import MAX_OPEN, run_jobs
from tenants.models import Tenant, TenantJob
from tests.support.answer_caches.cache_warming import NANO, Asker, current, enable_warming, make_prices
from tests.support.request_log.records import record
from tests.support.rows import of
from tests.support.tenants.management_api import by_role

pytestmark = [pytest.mark.django_db, pytest.mark.acme(signed_in="owner")]
URL = "/t/acme/usage/warming/"
CANDIDATES = f"{URL}panels/candidates"
BOX = re.compile(r'type="checkbox" name="prompt" value="([0-9a-f]{32})"')


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    make_prices()
    return enable_warming(acme)


@pytest.fixture
def asker(acme: Tenant) -> Asker:
    return Asker(acme, datetime.now(UTC))


def read(client: Any, url: str = URL) -> str:
    response = client.get(url)
    assert response.status_code == 200
    text: str = response.content.decode()
    assert "panel-error" not in text
    return text


def digest(tenant: Tenant) -> None:
    digest_history(tenant.pk, datetime.now(UTC))


def test_repeated_prompts_have_their_costs(client, acme, asker):
    newest = asker.ask_daily("Where is my <b>order</b>?")
    digest(acme)
    panel = read(client, CANDIDATES)
    assert f'<a href="/t/acme/requests/{newest}">Where is my &lt;b&gt;order&lt;/b&gt;?</a>' in panel
    assert 'value="0.0009"' in panel and 'value="0.00054"' in panel  # now, and warmed
    assert re.search(r'data-label="Requests"><span class="tabular">7<', panel)
    assert len(BOX.findall(panel)) == 1
    assert 'id="panel-candidates"' in read(client)
    assert 'href="/t/acme/usage/warming/"' in read(client, "/t/acme/usage/")


def test_selected_prompts_are_warmed_by_a_job(client, acme, asker):
    asker.ask_daily("First")
    asker.ask_daily("Second")
    digest(acme)
    chosen = BOX.findall(read(client, CANDIDATES))[0]
    form = read(client, f"{URL}run?prompt={chosen}")
    assert "Warm 1 prompt" in form and f'type="hidden" name="prompt" value="{chosen}"' in form
    for _ in range(2):  # a form that is sent twice starts one job
        response = client.post(f"{URL}run", {"prompt": chosen, "when": "now", "budget": "0.50"})
        assert (response.status_code, response.url) == (303, URL)
    assert current(acme).cache_warming_nano == NANO // 2
    assert "Warming of 1 prompt" in read(client)
    assert run_jobs() == 1
    (row,) = of(WarmedPrompt, acme)
    assert bytes(row.fingerprint).hex() == chosen
    page = read(client)
    assert "Computed ahead: 1<" in page and "Not settled: 1" in page
    panel = read(client, CANDIDATES)
    assert "Cached" in panel and chosen not in panel


def test_a_job_names_why_selected_prompts_were_left_out(client, acme, asker):
    asker.ask_daily("First")
    asker.ask_daily("Second")
    digest(acme)
    chosen = BOX.findall(read(client, CANDIDATES))
    assert len(chosen) == 2
    client.post(f"{URL}run", {"prompt": [*chosen, "0" * 32], "when": "now", "budget": "0.50"})
    actions.do_revoke_api_key(asker.key)
    assert run_jobs() == 1
    assert "Computed ahead: 0 · without a usable API key: 2 · no longer available: 1" in read(client)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        ({"when": "now", "budget": "1"}, "Select prompts in the list first."),
        ({"when": "now", "budget": "1", "prompt": ["x", "A" * 32, "0" * 33]}, "Select prompts in the list first."),
        ({"when": "now", "budget": "0", "prompt": "0" * 32}, "Enter more than 0."),
        ({"when": "nightly", "budget": "x"}, "Enter a positive amount"),
        ({"when": "nightly", "budget": "9999999"}, "or less."),
        ({"when": "nightly"}, "required"),
        ({"when": "never", "budget": "1"}, "valid choice"),
    ],
)
def test_invalid_forms_change_nothing(client, acme, sent, error):
    response = client.post(f"{URL}run", sent)
    assert response.status_code == 422
    assert error in response.content.decode()
    assert (current(acme).cache_warming_nano, of(TenantJob, acme)) == (NANO, [])


def test_every_night_needs_only_a_budget(client, acme):
    assert "Prompts are warmed every night" in read(client)
    response = client.post(f"{URL}run", {"when": "nightly", "budget": "0"}, follow=True)
    assert "Cache warming is off." in response.content.decode()
    response = client.post(f"{URL}run", {"when": "nightly", "budget": "2"}, follow=True)
    assert "Prompts are warmed every night." in response.content.decode()
    assert (current(acme).cache_warming_nano, of(TenantJob, acme)) == (2 * NANO, [])


def test_prompt_logging_is_asked_for_and_not_switched_on(client, acme):
    actions.do_update_settings(acme, content_retention_days=0)
    page = read(client)
    assert "Prompt logging is off" in page and "Members with access to requests can read them." in page
    assert 'href="/t/acme/settings/content"' in page
    assert "panel-candidates" not in page and "usage/warming/run" not in page
    response = client.post(f"{URL}run", {"prompt": "0" * 32, "when": "now", "budget": "5"})
    assert response.status_code == 422
    assert "Prompts are not stored" in response.content.decode()
    row = current(acme)
    assert (row.content_retention_days, row.cache_warming_nano, of(TenantJob, acme)) == (0, NANO, [])
    assert "/t/acme/settings/content" not in read(by_role(acme, "developer"))


def test_a_suspended_tenant_warms_nothing(client, acme, asker):
    asker.ask_daily()
    digest(acme)
    actions.do_suspend_tenant(acme)
    assert "Organization suspended." in read(client)
    panel = read(client, CANDIDATES)
    assert "Hello" in panel and "checkbox" not in panel and "Warm selected" not in panel
    response = client.post(f"{URL}run", {"prompt": "0" * 32, "when": "now", "budget": "5"})
    assert response.status_code == 422
    assert "The tenant is suspended." in response.content.decode()


def test_states_without_candidates(client, acme, asker):
    assert "No stored prompts" in read(client, CANDIDATES)
    asker.ask(asker.now - timedelta(hours=2))
    panel = read(client, CANDIDATES)
    assert "No repeated prompts" in panel and "Search prompts" in panel
    assert "were not searched yet" in panel
    digest(acme)
    panel = read(client, CANDIDATES)
    assert "No repeated prompts" in panel and "Search prompts" not in panel
    actions.do_update_settings(acme, answer_cache_seconds=0)
    assert "The answer cache is off, so only prefixes are listed." in read(client, CANDIDATES)


def test_a_search_finds_prompts_of_a_tenant_without_a_budget(client, acme, asker):
    actions.do_update_settings(acme, cache_warming_nano=0)
    asker.ask_daily()
    assert client.get(f"{URL}search").status_code == 405
    assert "are being searched" in client.post(f"{URL}search", follow=True).content.decode()
    assert run_jobs() == 1
    assert "Prompts to search: 0" in read(client)
    assert len(BOX.findall(read(client, CANDIDATES))) == 1


def test_a_job_that_fails_says_why(client, acme, monkeypatch):
    client.post(f"{URL}run", {"prompt": "0" * 32, "when": "now", "budget": "1"})
    refused = Mock(side_effect=Conflict("The file quota is used up."))
    monkeypatch.setattr("millrace.apps.answer_caches.warming_jobs.do_warm_caches", refused)
    assert run_jobs() == 1
    page = read(client)
    assert "Failed" in page and "The file quota is used up." in page


def test_without_a_job_the_budget_stays_as_it_was(client, acme):
    with tenant_scope(acme):
        for _ in range(MAX_OPEN):
            TenantJob.objects.create(tenant=acme, kind="tests.none", permission="tenant.read", actor={})
    response = client.post(f"{URL}run", {"prompt": "0" * 32, "when": "now", "budget": "5"})
    assert response.status_code == 422
    assert "jobs are unfinished" in response.content.decode()
    assert current(acme).cache_warming_nano == NANO


def test_past_runs_show_hits_and_money_saved(client, acme):
    now = datetime.now(UTC)
    assert "No runs in the last 30 days." in read(client)
    with tenant_scope(acme):
        for number in range(2):
            WarmedPrompt.objects.create(
                tenant_id=acme.pk,
                cache="answer",
                fingerprint=b"f",
                key_id=1,
                model="alpha",
                source_request_id="req_1",
                batch_id=1,
                batch_line=number,
                created_at=now,
                expires_at=now,
                expected_femto=1,
                max_femto=1,
                request_id=f"req_w{number}",
                cost_femto=10**15,
                hits=3,
                saved_femto=4 * 10**15,
            )
    panel = read(client, f"{URL}panels/runs")
    cells = [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", panel)]
    assert cells == ["2", "0", "6", "$2.00", "$8.00"]


def test_ten_thousand_prompts_with_long_names_are_twenty_rows(client, acme):
    now = datetime.now(UTC)
    template = record(
        acme, request_id="req_t", started_at=now, prompt_tokens=1000, max_tokens=9, key_id=Asker(acme).key.pk
    )
    fields = {field.attname: getattr(template, field.attname) for field in RequestRecord._meta.concrete_fields}
    records, contents = [], []
    for number in range(10_000):
        row = {"request_id": f"req_{number:05}", "started_at": now - timedelta(hours=5, seconds=number)}
        prefix = f"{number // 4:032x}"
        digests = {"answer": f"{number:032x}", "choices": 1, "prefixes": [[prefix, 1, 0.9]]}
        body = '{"messages": [{"role": "system", "content": "%s"}]}' % ("鍵の名前" * 50)
        records.append(RequestRecord(**fields | row))
        contents.append(RequestContent(tenant_id=acme.pk, body=body, truncated=False, digests=digests, **row))
    with all_tenants_scope(BypassReason.COMMAND):
        RequestRecord.objects.all_tenants().bulk_create(records, batch_size=1000)
        RequestContent.objects.all_tenants().bulk_create(contents, batch_size=1000)
    panel = read(client, CANDIDATES)
    assert len(BOX.findall(panel)) == 20
    assert len(panel) < 60_000
    assert "鍵の名前" * 40 in panel and "鍵の名前" * 41 not in panel


@pytest.mark.parametrize("role", ["developer", "billing", "readonly"])
def test_other_roles_read_and_warm_nothing(acme, asker, role):
    asker.ask_daily()
    digest(acme)
    client = by_role(acme, role)
    panel = read(client, CANDIDATES)
    assert "Hello" in panel and "checkbox" not in panel
    assert "Edit budget" not in read(client)
    assert client.get(f"{URL}run").status_code == 403
    assert client.post(f"{URL}run", {"when": "nightly", "budget": "5"}).status_code == 403
    assert client.post(f"{URL}search").status_code == 403
    assert (current(acme).cache_warming_nano, of(TenantJob, acme)) == (NANO, [])


def test_only_those_who_may_warm_see_the_jobs(client, acme):
    client.post(f"{URL}search")
    assert "Search of stored prompts" in read(client)
    developer = by_role(acme, "developer")
    assert "Search of stored prompts" not in read(developer)
    assert developer.get(f"{URL}panels/jobs").status_code == 404


def test_other_tenants_see_nothing(client, acme, asker):
    asker.ask_daily()
    digest(acme)
    other = enable_warming(actions.do_create_tenant("other", "Other"))
    assert client.get("/t/other/usage/warming/").status_code == 404
    assert "Hello" not in read(by_role(other, "owner"), "/t/other/usage/warming/panels/candidates")
