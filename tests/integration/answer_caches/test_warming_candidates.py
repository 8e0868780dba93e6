"""Candidates of cache warming: the most repeated prompts with their costs, runs of selected ones, and past runs."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from billing.currencies.amounts import FEMTO_A_NANO
from millrace.apps.answer_caches import cache_warming, warming_api, warming_jobs
from millrace.apps.answer_caches.cache_warming import CandidateList, do_warm_caches, list_candidates
from millrace.apps.answer_caches.models import WarmedPrompt
from millrace.apps.answer_caches.warming_candidates import digest_history
from millrace.apps.answer_caches.warming_jobs import run_parameters, search_prompts
from millrace.apps.answer_caches.warming_status import PastRun, past_runs
from tenants import actions
from tenants.isolation.scopes import tenant_scope
from tenants.jobs import do_start_job, run_jobs
from tenants.models import Tenant, TenantJob
from tests.support.answer_caches.cache_warming import (
    COST,
    MAX_COST,
    SAVED,
    Asker,
    current,
    enable_warming,
    make_prices,
)
from tests.support.request_log.records import NOW
from tests.support.rows import of
from tests.support.tenants.acme import make_acme
from tests.support.tenants.management_api import by_key


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    make_prices()
    return enable_warming(acme)


def rows_of(tenant: Tenant) -> list[WarmedPrompt]:
    return sorted(of(WarmedPrompt, tenant), key=lambda row: row.pk)


def candidates_of(tenant: Tenant) -> CandidateList:
    digest_history(tenant.pk, NOW)
    with tenant_scope(tenant):
        return list_candidates(current(tenant), now=NOW)


def fingerprints_of(tenant: Tenant) -> dict[int, str]:
    """Return the fingerprint of each candidate by its number of requests."""
    return {row.requests: row.fingerprint for row in candidates_of(tenant).rows}


def test_candidates_have_the_costs_of_their_next_request(acme: Tenant) -> None:
    newest = Asker(acme).ask_daily()
    Asker(acme).ask_daily("Rare", [2, 5])
    with tenant_scope(acme):
        found = list_candidates(current(acme), now=NOW)
    assert (found.stored, found.undigested, list(found.rows)) == (11, 11, [])  # no prompt has digests yet
    found = candidates_of(acme)
    assert (found.stored, found.undigested) == (11, 0)
    often, rare = found.rows
    assert (often.requests, rare.requests) == (7, 2)
    assert (often.priced.candidate.newest.request_id, often.is_cached) == (newest, False)
    standard = (100 * 3_000_000 + 40 * 15_000_000) * 1000
    assert (often.priced.standard_femto, often.priced.warmed_femto) == (standard, COST + standard - SAVED)
    assert often.priced.expected_femto == SAVED * 8 // 9 - COST
    assert rare.priced.expected_femto < 0
    do_warm_caches(current(acme), now=NOW)
    assert [row.is_cached for row in candidates_of(acme).rows] == [True, False]


def test_candidates_are_the_most_repeated_ones(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    asker = Asker(acme)
    for number in range(4):
        asker.ask_daily(f"Question {number}", range(1, 4 + number))
    monkeypatch.setattr(cache_warming, "MAX_LISTED", 2)
    assert [row.requests for row in candidates_of(acme).rows] == [6, 5]


def test_without_an_answer_cache_only_prefixes_are_candidates(acme: Tenant) -> None:
    Asker(acme).ask_daily()
    actions.do_update_settings(acme, answer_cache_seconds=0)
    assert list(candidates_of(acme).rows) == []


def test_a_run_of_selected_candidates_warms_only_these(acme: Tenant) -> None:
    Asker(acme).ask_daily()
    Asker(acme).ask_daily("Rare", [2, 5])
    chosen = {bytes.fromhex(fingerprints_of(acme)[2])}
    run = do_warm_caches(current(acme), only=chosen, now=NOW)
    assert (run.prompts, run.not_worthwhile, run.over_budget) == (1, 0, 0)
    assert run.expected_femto < 0  # it was selected all the same
    assert [bytes(row.fingerprint) for row in rows_of(acme)] == list(chosen)
    assert do_warm_caches(current(acme), only=chosen, now=NOW).prompts == 0
    assert do_warm_caches(current(acme), only={b"unknown"}, now=NOW).prompts == 0
    assert do_warm_caches(current(acme), now=NOW).prompts == 1


def test_a_run_of_selected_candidates_keeps_to_the_budget(db: None) -> None:
    make_prices()
    tenant = enable_warming(make_acme(), budget_nano=MAX_COST // FEMTO_A_NANO)
    asker = Asker(tenant)
    for text in ("One", "Two"):
        asker.ask_daily(text)
    chosen = {row.priced.candidate.fingerprint for row in candidates_of(tenant).rows}
    run = do_warm_caches(tenant, only=chosen, now=NOW)
    assert (len(chosen), run.prompts, run.over_budget) == (2, 1, 1)


def test_a_run_of_selected_candidates_reports_what_it_leaves_out(db: None) -> None:
    make_prices()
    tenant = enable_warming(make_acme(), budget_nano=MAX_COST // FEMTO_A_NANO)
    asker, other = Asker(tenant), Asker(tenant)
    for text in ("Within the budget", "Over the budget", "Cached", "Unpriced"):
        asker.ask_daily(text)
    other.ask_daily("Of another key")
    chosen = {row.priced.candidate.fingerprint for row in candidates_of(tenant).rows}
    assert len(chosen) == 5
    asker.ask(NOW - timedelta(minutes=1), "Cached")
    asker.ask(NOW - timedelta(hours=2), "Unpriced", served_model="unpriced")
    actions.do_revoke_api_key(other.key)
    digest_history(tenant.pk, NOW)
    run = do_warm_caches(current(tenant), only={*chosen, bytes(16)}, now=NOW)
    left_out = {"cached": 1, "without_key": 1, "unpriced": 1, "over_budget": 1, "unavailable": 1}
    assert {name: getattr(run, name) for name in left_out} == left_out
    assert (run.prompts, run.not_worthwhile) == (1, 0)


def test_selected_answers_are_unavailable_without_an_answer_cache(acme: Tenant) -> None:
    Asker(acme).ask_daily()
    chosen = {row.priced.candidate.fingerprint for row in candidates_of(acme).rows}
    actions.do_update_settings(acme, answer_cache_seconds=0)
    run = do_warm_caches(current(acme), only=chosen, now=NOW)
    assert (run.prompts, run.cached, run.unavailable) == (0, 0, 1)


def test_a_run_that_chooses_reports_the_cached_candidates(acme: Tenant) -> None:
    Asker(acme).ask_daily()
    assert do_warm_caches(current(acme), now=NOW).cached == 0
    run = do_warm_caches(current(acme), now=NOW)
    assert (run.prompts, run.cached, run.unavailable) == (0, 1, 0)


def test_api_of_candidates(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming_api, "list_candidates", partial(list_candidates, now=NOW))
    monkeypatch.setattr(warming_jobs, "do_warm_caches", partial(do_warm_caches, now=NOW))
    asker = Asker(acme)
    newest = asker.ask_daily()
    digest_history(acme.pk, NOW)
    client = by_key(acme)
    found = client.get("/api/cache-warming/candidates").json()
    assert (found["stored"], found["undigested"]) == (8, 0)
    (row,) = found["results"]
    assert (row["cache"], row["model"], row["key_id"], row["requests"]) == ("answer", "alpha", asker.key.pk, 7)
    assert (row["source_request_id"], row["is_cached"]) == (newest, False)
    assert (row["standard_usd"], row["warmed_usd"], row["max_usd"]) == ("0.0009", "0.00054", "0.000525")
    other = by_key(actions.do_create_tenant("other", "other"))
    assert other.get("/api/cache-warming/candidates").json()["results"] == []
    for body in ({"fingerprints": []}, {"fingerprints": ["x"]}, {"fingerprint": row["fingerprint"]}):
        assert client.post("/api/cache-warming/run", body, format="json").status_code == 400
    sent = {"fingerprints": [row["fingerprint"]]}
    response = client.post("/api/cache-warming/run", sent, format="json")
    assert (response.status_code, response.json()["parameters"]) == (202, sent)
    assert run_jobs() == 1
    result = client.get(f"{response['location']}/result").json()
    assert (result["prompts"], result["cached"], result["unavailable"]) == (1, 0, 0)
    assert [bytes(row.fingerprint).hex() for row in rows_of(acme)] == sent["fingerprints"]


def test_a_job_searches_prompts_of_a_tenant_without_a_budget(acme: Tenant) -> None:
    actions.do_update_settings(acme, cache_warming_nano=0)
    at = datetime.now(UTC) - timedelta(hours=1)
    asker = Asker(acme)
    for _ in range(2):
        asker.ask(at)
    do_start_job(acme, search_prompts)
    assert run_jobs() == 1
    (job,) = of(TenantJob, acme)
    assert (job.status, json.loads(job.result)) == ("completed", {"stored": 2, "undigested": 0})
    assert run_parameters([]) == {}


def test_past_runs_have_hits_costs_and_savings(acme: Tenant) -> None:
    fields = {"key_id": 1, "model": "alpha", "source_request_id": "req_1", "expected_femto": 1, "max_femto": 1}
    with tenant_scope(acme):
        for number, (at, cache, cost, hits) in enumerate(
            (
                (NOW, "answer", 5, 2),
                (NOW, "prefix", None, 0),
                (NOW - timedelta(days=1), "answer", 7, 0),
                (NOW - timedelta(days=40), "answer", 7, 0),
            )
        ):
            WarmedPrompt.objects.create(
                tenant_id=acme.pk,
                cache=cache,
                fingerprint=b"f",
                batch_id=1,
                batch_line=number,
                created_at=at,
                expires_at=at,
                cost_femto=cost,
                hits=hits,
                saved_femto=3 * hits,
                **fields,
            )
        runs = past_runs(acme, NOW - timedelta(days=30))
    assert runs == [
        PastRun(NOW, prompts=2, prefixes=1, unsettled=1, hits=2, spent_femto=5, saved_femto=6),
        PastRun(NOW - timedelta(days=1), prompts=1, prefixes=0, unsettled=0, hits=0, spent_femto=7, saved_femto=0),
    ]
