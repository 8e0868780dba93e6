"""Cache warming: the choice of prompts, its budget, what it cost and saved, and what is never warmed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from billing.currencies.amounts import FEMTO_A_NANO
from millrace.apps.answer_caches import cache_warming, tasks
from millrace.apps.answer_caches.cache_warming import WarmingRun, do_warm_caches
from millrace.apps.answer_caches.models import WarmedPrompt
from millrace.apps.answer_caches.warming_settlement import settle_warmed
from millrace.apps.batches.actions import do_advance, storage
from millrace.apps.batches.models import Batch, File
from millrace.apps.request_log.models import RequestContent, RequestRecord
from millrace.apps.request_log.tasks import purge_expired
from millrace.environment.configuration import hours
from tenants import actions
from tenants.actions import Conflict
from tenants.isolation.scopes import tenant_scope
from tenants.jobs import run_jobs
from tenants.models import Tenant
from tests.support.answer_caches.cache_warming import (
    COST,
    DAYS,
    MAX_COST,
    NANO,
    SAVED,
    Asker,
    current,
    enable_warming,
    make_prices,
)
from tests.support.request_log.records import NOW, record, settle
from tests.support.rows import of
from tests.support.tenants.acme import make_acme
from tests.support.tenants.management_api import by_key, by_role

SYSTEM = {"role": "system", "content": "Answer in one sentence. " * 200}


class Killed(Exception):
    """An error that simulates the job's end at this line."""


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    make_prices()
    return enable_warming(acme)


def warm(tenant: Tenant, now: datetime = NOW) -> WarmingRun:
    return do_warm_caches(current(tenant), now=now)


def rows_of(tenant: Tenant) -> list[WarmedPrompt]:
    return sorted(of(WarmedPrompt, tenant), key=lambda row: row.pk)


def lines_of(batch: Batch) -> list[dict[str, Any]]:
    return [json.loads(line) for line in storage().path(batch.input_file).read_bytes().splitlines()]


def end(batch: Batch, **fields: Any) -> None:
    """End a batch, as the web jobs do."""
    with tenant_scope(batch.tenant_id):
        ended = {"status": "completed", "completed_at": NOW, **fields}
        Batch.objects.for_tenant(batch.tenant_id).filter(pk=batch.pk).update(**ended)


def run_line(tenant: Tenant, row: WarmedPrompt, name: str, cost: int = COST, **fields: Any) -> None:
    """Record the request of a line, as a gateway and the settler do."""
    at = NOW + timedelta(minutes=1)
    line = {"batch_id": row.batch_id, "batch_line": row.batch_line, "endpoint": "batch"}
    record(tenant, request_id=name, started_at=at, **line | {"cache_layer": "computed"} | fields)
    settle(tenant, name, at=at, cost_femto=cost, uncached=100, output=40)


# The choice.


def test_a_frequent_prompt_is_computed_in_the_batch_class(acme: Tenant) -> None:
    asker = Asker(acme)
    newest = asker.ask_daily()
    asker.ask(NOW - timedelta(days=3), "Only once")
    expected = SAVED * 8 // 9 - COST  # on 7 of 7 days, with one more day of each kind
    assert warm(acme) == WarmingRun(1, 0, 0, 0, expected, MAX_COST)
    (row,) = rows_of(acme)
    assert (row.cache, row.source_request_id, row.key_id) == ("answer", newest, asker.key.pk)
    assert (row.expected_femto, row.max_femto, row.cost_femto) == (expected, MAX_COST, None)
    assert row.expires_at == NOW + timedelta(hours=1)
    (batch,) = of(Batch, acme)
    assert (batch.pk, batch.key_id, batch.endpoint) == (row.batch_id, asker.key.pk, "/v1/chat/completions")
    body = {"model": "mine", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    assert lines_of(batch) == [{"custom_id": "0", "method": "POST", "url": "/v1/chat/completions", "body": body}]


@pytest.mark.parametrize(
    "fields",
    [
        {"route": {"answer_cache": {"miss": "sampled"}}},
        {"route": {"answer_cache": {"miss": "not_cached", "no_store": True}}},
        {"stores": False},
        {"truncated": True},
        {"batch_id": 1, "batch_line": 0},
        {"endpoint": "embeddings"},
        {"outcome": "failed"},
        {"served_model": "unpriced"},
    ],
    ids=["sampled", "no-store", "not stored", "truncated", "batch", "embedding", "failed", "unpriced"],
)
def test_other_prompts_are_not_warmed(acme: Tenant, fields: dict[str, Any]) -> None:
    Asker(acme).ask_daily(**fields)
    assert warm(acme).prompts == 0
    assert of(Batch, acme) == []


def test_a_prompt_is_warmed_only_if_the_expected_saving_covers_the_cost(acme: Tenant) -> None:
    Asker(acme).ask_daily("Rare", [2, 5])
    assert warm(acme) == WarmingRun(0, 0, 1, 0, 0, 0)


def test_a_cached_answer_is_not_computed_again(acme: Tenant) -> None:
    asker = Asker(acme)
    asker.ask_daily()
    asker.ask(NOW - timedelta(minutes=59))
    assert warm(acme).prompts == 0
    assert warm(acme, NOW + timedelta(minutes=2)).prompts == 1


def test_a_prompt_of_a_revoked_key_is_not_warmed(acme: Tenant) -> None:
    asker = Asker(acme)
    asker.ask_daily()
    actions.do_revoke_api_key(asker.key)
    assert warm(acme).prompts == 0


def test_a_shared_prefix_is_computed_with_one_token(acme: Tenant) -> None:
    asker = Asker(acme, prompt_tokens=1000)
    asker.ask(NOW - timedelta(days=7, minutes=30))
    for number, day in enumerate(DAYS):
        turns = [SYSTEM, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
        question = {"role": "user", "content": f"Question {number}"}
        asker.ask(NOW - timedelta(days=day, minutes=-10), messages=[*turns, question])
        asker.ask(NOW - timedelta(days=day, minutes=-20), messages=[SYSTEM, question])
        asker.ask(NOW - timedelta(days=day, minutes=-30), messages=[{**SYSTEM, "content": "Short."}, question])
    run = warm(acme)
    assert (run.prompts, run.prefixes) == (1, 1)  # the prefix of both, and not the longer one too
    (row,) = rows_of(acme)
    assert (row.cache, row.expires_at) == ("prefix", NOW + cache_warming.PREFIX_LIFETIME)
    assert 900 < row.prefix_tokens < 1000
    assert row.max_femto >= (1000 * 1_500_000 + 7_500_000) * 1000
    (line,) = lines_of(*of(Batch, acme))
    assert line["body"] == {
        "model": "mine",
        "messages": [SYSTEM, {"role": "user", "content": "."}],
        "max_tokens": 1,
        "temperature": 0,
    }
    assert warm(acme, NOW + timedelta(hours=1)).prompts == 0


def test_prefixes_are_not_warmed_while_requests_do_not_use_them(acme: Tenant) -> None:
    asker = Asker(acme, prompt_tokens=1000)
    asker.ask(NOW - timedelta(days=7, minutes=30))
    for number, day in enumerate(DAYS):
        question = {"role": "user", "content": f"Question {number}"}
        asker.ask(NOW - timedelta(days=day, minutes=-10), messages=[SYSTEM, question])
    assert warm(acme).prefixes == 1
    with tenant_scope(acme):
        WarmedPrompt.objects.for_tenant(acme).update(
            request_id="req_warm",
            cost_femto=1,
            expires_at=NOW - timedelta(hours=1),
            created_at=NOW - timedelta(hours=9),
        )
    run = warm(acme)
    assert (run.prompts, run.not_worthwhile) == (0, 1)


def test_breakpoints_are_not_bought(acme: Tenant) -> None:
    content = [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
    Asker(acme, endpoint="messages").ask_daily(messages=[{"role": "user", "content": content}])
    assert warm(acme).prompts == 1
    (batch,) = of(Batch, acme)
    assert (batch.dialect, batch.endpoint, batch.name[:9]) == ("anthropic", "/v1/messages", "msgbatch_")
    (line,) = lines_of(batch)
    assert line["body"]["messages"] == [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]


# Consent and budget.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tenant: actions.do_update_settings(tenant, cache_warming_nano=0), "Cache warming is off"),
        (lambda tenant: actions.do_update_settings(tenant, content_retention_days=0), "Prompts are not stored"),
        (actions.do_suspend_tenant, "suspended"),
    ],
    ids=["off", "not stored", "suspended"],
)
def test_warming_needs_consent(acme: Tenant, change: Any, message: str) -> None:
    Asker(acme).ask_daily()
    change(acme)
    with pytest.raises(Conflict, match=message):
        warm(acme)
    assert of(Batch, acme) == []


def test_without_an_answer_cache_answers_are_not_warmed(acme: Tenant) -> None:
    Asker(acme).ask_daily()
    actions.do_update_settings(acme, answer_cache_seconds=0)
    assert warm(acme).prompts == 0


def test_the_budget_of_a_day_is_not_overrun(db: None) -> None:
    make_prices()
    maximum = MAX_COST // FEMTO_A_NANO
    tenant = enable_warming(make_acme(), budget_nano=2 * maximum - 1)
    asker = Asker(tenant)
    for text in ("One", "Two", "Three"):
        asker.ask_daily(text)
    assert (warm(tenant).prompts, warm(tenant).over_budget) == (1, 2)
    # The cost of a settled prompt is less than its maximum.
    (row,) = rows_of(tenant)
    run_line(tenant, row, "req_warm", cost=1)
    end(*of(Batch, tenant), succeeded=1)
    assert warm(tenant).prompts == 1
    assert warm(tenant).over_budget == 1
    # The next day has its own budget.
    assert warm(tenant, NOW + timedelta(hours=12)).prompts == 0  # at this time of the day, nothing is requested
    with tenant_scope(tenant):
        WarmedPrompt.objects.for_tenant(tenant).update(created_at=NOW - timedelta(days=1))
    assert warm(tenant).prompts == 1


def test_a_reservation_above_the_price_counts(acme: Tenant) -> None:
    Asker(acme, reserved_nano=NANO).ask_daily()
    assert warm(acme).max_femto == NANO * FEMTO_A_NANO


# Concurrency and kills.


def test_a_second_run_warms_nothing(acme: Tenant) -> None:
    Asker(acme).ask_daily()
    assert [warm(acme).prompts for _ in range(3)] == [1, 0, 0]
    # Lines that were not run, such as of an expired batch, may run again.
    end(*of(Batch, acme), status="expired", completed_at=None, expired_at=NOW, expired=1)
    assert warm(acme).prompts == 1
    assert [row.cost_femto for row in rows_of(acme)] == [0, None]


def test_a_run_that_is_killed_has_warmed_nothing(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("One", "Two"):
        Asker(acme).ask_daily(text)  # two keys need two batches
    names = iter(["batch_first"])

    def name(prefix: str) -> str:
        try:
            return next(names)
        except StopIteration:
            raise Killed from None

    with monkeypatch.context() as patch:
        patch.setattr(cache_warming, "new_name", name)
        with pytest.raises(Killed):
            warm(acme)
    assert (of(Batch, acme), of(WarmedPrompt, acme), of(File, acme)) == ([], [], [])
    assert warm(acme).prompts == 2


def test_a_line_whose_record_was_lost_counts_at_its_maximum(acme: Tenant) -> None:
    """The gateway was killed after the answer, before it wrote its record: the request may be billed."""
    Asker(acme).ask_daily()
    warm(acme)
    end(*of(Batch, acme), succeeded=1)
    settle_warmed(acme, now=NOW + timedelta(minutes=5))
    assert rows_of(acme)[0].cost_femto is None
    settle_warmed(acme, now=NOW + timedelta(minutes=11))
    assert rows_of(acme)[0].cost_femto == MAX_COST
    assert warm(acme, NOW + timedelta(minutes=12)).prompts == 0


@pytest.mark.django_db(transaction=True)
def test_two_concurrent_runs_warm_once(table: None) -> None:
    make_prices()
    tenant = enable_warming(make_acme())
    Asker(tenant).ask_daily()

    def run(_: int) -> int:
        try:
            return do_warm_caches(tenant, now=NOW).prompts
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(run, range(4))) == [0, 0, 0, 1]
    assert len(of(Batch, tenant)) == 1


# Costs and savings.


def test_the_cost_and_the_saving_of_a_prompt_are_recorded(acme: Tenant) -> None:
    Asker(acme).ask_daily()
    warm(acme)
    (row,) = rows_of(acme)
    run_line(acme, row, "req_warm")
    settle(acme, "req_warm.q", at=NOW + timedelta(minutes=1), cost_femto=5)  # the vector of the semantic cache
    with tenant_scope(acme):
        copy = {"started_at": NOW, "body": "{}", "truncated": False}
        RequestContent.objects.create(tenant_id=acme.pk, request_id="req_warm", **copy)
    settle_warmed(acme, now=NOW + timedelta(minutes=2))
    assert rows_of(acme)[0].cost_femto is None  # its batch runs
    batch = of(Batch, acme)[0]
    path = storage().path(batch.input_file)
    assert path.exists()
    end(batch, succeeded=1)
    for number, layer in enumerate(("exact", "semantic", "exact")):
        at = NOW + timedelta(minutes=3 + number)
        record(acme, request_id=f"req_h{number}", started_at=at, cache_layer=layer, cache_source="req_warm")
        settle(acme, f"req_h{number}", SAVED + number, at=at, answer_hit_input=100, answer_hit_output=40)
    for _ in range(2):
        settle_warmed(acme, now=NOW + timedelta(minutes=9))
        (row,) = rows_of(acme)
        assert (row.request_id, row.cost_femto, row.hits, row.saved_femto) == ("req_warm", COST + 5, 3, SAVED)
    # No copy of the prompt is stored longer than the prompt.
    assert of(RequestContent, acme, request_id="req_warm") == []
    assert of(File, acme) == []


def test_a_prefix_saves_what_its_first_request_reads(acme: Tenant) -> None:
    asker = Asker(acme, prompt_tokens=1000)
    asker.ask(NOW - timedelta(days=7, minutes=30))
    for number, day in enumerate(DAYS):
        question = {"role": "user", "content": f"Question {number}"}
        asker.ask(NOW - timedelta(days=day, minutes=-10), messages=[SYSTEM, question])
    warm(acme)
    (row,) = rows_of(acme)
    run_line(acme, row, "req_warm")
    end(*of(Batch, acme), succeeded=1)
    tokens = row.prefix_tokens
    for minutes, read in ((5, 2 * tokens), (6, 1000)):
        turns = [SYSTEM, {"role": "user", "content": f"Now {minutes}"}]
        usage = {"cache_read": read, "saved_femto": 2 * read}
        asker.ask(NOW + timedelta(minutes=minutes), messages=turns, usage=usage, cache_layer="prefix")
    settle_warmed(acme, now=NOW + timedelta(minutes=9))
    (row,) = rows_of(acme)
    assert (row.hits, row.saved_femto) == (2, 2 * tokens)


def test_without_consent_the_batch_is_cancelled(acme: Tenant) -> None:
    Asker(acme).ask_daily()
    warm(acme)
    actions.do_update_settings(acme, content_retention_days=0)
    tasks.warm_caches(NOW + timedelta(minutes=1))
    (batch,) = of(Batch, acme)
    assert batch.status == "cancelling"


# The job, the API and the isolation of tenants.


def test_the_job_warms_in_its_hours(acme: Tenant, settings: Any) -> None:
    Asker(acme).ask_daily()
    enable_warming(actions.do_create_tenant("other", "other"))
    refused = enable_warming(actions.do_create_tenant("refused", "refused"))
    actions.do_update_settings(refused, content_retention_days=0)
    settings.MILLRACE = replace(settings.MILLRACE, cache_warming_hours=hours("13-14"))
    assert tasks.warm_caches(NOW) == 0
    settings.MILLRACE = replace(settings.MILLRACE, cache_warming_hours=hours("12-13"))
    assert tasks.warm_caches(NOW) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-6", {0, 1, 2, 3, 4, 5}), ("22-2", {22, 23, 0, 1}), ("0-24", set(range(24))), ("23-24", {23})],
)
def test_hours(text: str, expected: set[int]) -> None:
    assert hours(text) == expected


@pytest.mark.parametrize("text", ["", "6", "a-b", "0-25", "24-3", "-1-3"])
def test_invalid_hours(text: str) -> None:
    with pytest.raises(ValueError, match="two hours"):
        hours(text)


def test_api(acme: Tenant) -> None:
    client = by_key(acme)
    Asker(acme)
    response = client.post("/api/cache-warming/run")
    assert (response.status_code, response.json()["status"]) == (202, "queued"), response.content
    assert client.get(f"{response['location']}/result").status_code == 409
    assert run_jobs() == 1
    assert client.get(response["location"]).json()["status"] == "completed"
    names = ("prompts", "prefixes", "not_worthwhile", "over_budget", "cached", "without_key", "unpriced", "unavailable")
    assert client.get(f"{response['location']}/result").json() == {
        **dict.fromkeys(names, 0),
        "expected_usd": "0.00",
        "max_usd": "0.00",
    }
    asker = Asker(acme)
    asker.ask_daily()
    do_warm_caches(acme, now=NOW)
    (row,) = rows_of(acme)
    run_line(acme, row, "req_warm")
    end(*of(Batch, acme), succeeded=1)
    settle_warmed(acme, now=NOW)
    found = client.get("/api/cache-warming", {"from": "2026-11-10T00:00:00Z", "to": "2026-11-11T00:00:00Z"}).json()
    assert (found["budget_nano"], found["prompts"], found["computed"], found["used"]) == (NANO, 1, 1, 0)
    assert (found["spent_usd"], found["saved_usd"]) == ("0.00045", "0.00")
    (prompt,) = found["results"]
    assert (prompt["cache"], prompt["request_id"], prompt["cost_usd"]) == ("answer", "req_warm", "0.00045")
    actions.do_update_settings(acme, cache_warming_nano=0)
    assert client.post("/api/cache-warming/run").status_code == 409
    assert client.patch("/api/tenant", {"cache_warming_nano": -1}, format="json").status_code == 400
    changed = client.patch("/api/tenant", {"cache_warming_nano": 5}, format="json")
    assert changed.json()["cache_warming_nano"] == 5


def test_batches_and_their_files_are_internal(acme: Tenant) -> None:
    Asker(acme).ask_daily()
    warm(acme)
    (batch,) = of(Batch, acme)
    do_advance(batch.pk)
    end(batch, status="finalizing", completed_at=None)
    do_advance(batch.pk)
    assert [file.is_internal for file in of(File, acme)] == [True, True]
    owner, (ended,) = by_role(acme, "owner"), of(Batch, acme)
    assert ended.is_internal
    for name in (ended.name, *(file.name for file in of(File, acme))):
        assert name not in owner.get("/t/acme/batches/").content.decode()
        assert name not in owner.get("/t/acme/batches/new").content.decode()
    assert owner.get(f"/t/acme/batches/{ended.name}/").status_code == 404


def test_other_tenants_are_not_warmed_or_seen(acme: Tenant) -> None:
    Asker(acme).ask_daily()
    other = enable_warming(actions.do_create_tenant("other", "other"))
    assert warm(other).prompts == 0
    warm(acme)
    found = by_key(other).get("/api/cache-warming", {"from": "2026-11-10T00:00:00Z", "to": "2026-11-11T00:00:00Z"})
    assert (found.json()["prompts"], found.json()["results"]) == (0, [])
    with tenant_scope(other), connection.cursor() as cursor:  # by row-level security
        cursor.execute("SELECT count(*) FROM request_log_warmedprompt")
        assert cursor.fetchone() == (0,)


def test_old_rows_are_removed(acme: Tenant) -> None:
    Asker(acme).ask_daily()
    warm(acme)
    purge_expired(NOW)
    assert len(rows_of(acme)) == 1
    purge_expired(NOW + timedelta(days=400))
    assert (rows_of(acme), of(RequestRecord, acme)) == ([], [])
