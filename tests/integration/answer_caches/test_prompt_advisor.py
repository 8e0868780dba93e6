"""The prompt advisor: which changing part of a prompt defeats the prefix cache, and what it costs."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import pytest

from billing.rates.pricing import Component, Rate, RateCard, Tier
from millrace.apps.answer_caches import prompt_advisor
from millrace.apps.answer_caches.prompt_advisor import PromptAdvice, find_change, prompt_advice, prompt_text
from millrace.apps.request_log.models import RequestContent
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Tenant
from tests.support.request_log import records
from tests.support.request_log.records import NOW
from tests.support.tenants.management_api import by_key

pytestmark = pytest.mark.acme(months=True)
START, END = NOW - timedelta(days=10), NOW + timedelta(days=5)
CARD = RateCard(
    7, None, "alpha", Tier.STANDARD, 0, (Rate(1, Component.UNCACHED, 3_000), Rate(2, Component.CACHE_READ, 300))
)


@pytest.fixture
def acme(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> Tenant:
    monkeypatch.setattr(prompt_advisor, "rate_cards", lambda versions: {version: CARD for version in versions})
    return acme


def settle(tenant: Tenant, request_id: str, changed_at: int, uncached: int, at: datetime = NOW) -> None:
    missed = {"changed_at": changed_at, "miss_reason": "prefix_changed", "price_version": CARD.version}
    records.settle(tenant, request_id, at=at, missed=missed, uncached=uncached)


def store(tenant: Tenant, request_id: str, system: str) -> None:
    body = {"model": "alpha", "messages": [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}]}
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        RequestContent.objects.all_tenants().create(
            tenant_id=tenant.pk, request_id=request_id, started_at=NOW, body=json.dumps(body), truncated=False
        )


def advice_of(tenant: Tenant) -> list[PromptAdvice]:
    with tenant_scope(tenant):
        return prompt_advice(tenant.pk, START, END)


def test_the_changing_part_has_its_place_its_text_and_its_cost(acme: Tenant) -> None:
    rules = "Answer briefly. " * 60
    for number in range(4):
        name = f"req_{number}"
        settle(acme, name, 12 + number, 1000, NOW + timedelta(seconds=number))
        store(acme, name, f"It is 10:{number}9. {rules}")
    settle(acme, "req_other", 900, 50)  # a single request is no pattern
    (advice,) = advice_of(acme)
    assert (advice.token_index, advice.requests, advice.recomputed_tokens) == (12, 4, 4000)
    assert (advice.text, advice.is_upper_bound) == ("3", False)
    assert 3900 < advice.avoidable_tokens < 4000
    assert advice.cost_femto == advice.avoidable_tokens * 2_700
    assert advice.month_femto == 2 * advice.cost_femto  # the period has 15 days
    assert advice.request_ids == ["req_3", "req_2"]


def test_without_stored_prompts_the_cost_is_an_upper_bound(acme: Tenant) -> None:
    for number in range(2):
        settle(acme, f"req_{number}", 12, 1000)
    (advice,) = advice_of(acme)
    assert (advice.avoidable_tokens, advice.is_upper_bound, advice.text) == (2000, True, None)


def test_prompts_that_differ_up_to_their_end_cannot_be_improved(acme: Tenant) -> None:
    for number, text in enumerate(("Who is x?", "Where are you now")):
        settle(acme, f"req_{number}", 12, 10)
        store(acme, f"req_{number}", "")
        with all_tenants_scope(BypassReason.HOUSEKEEPING):
            RequestContent.objects.all_tenants().filter(request_id=f"req_{number}").update(
                body=json.dumps({"prompt": text})
            )
    assert advice_of(acme) == []


def test_a_tenant_sees_only_its_own_advice(acme: Tenant) -> None:
    other = actions.do_create_tenant("other", "Other")
    for number in range(2):
        settle(acme, f"req_{number}", 12, 1000)
    assert advice_of(other) == []
    assert by_key(other).get("/api/requests/prompt-advice").json() == []
    query = f"?from={START:%Y-%m-%dT%H:%MZ}&to={END:%Y-%m-%dT%H:%MZ}"
    (row,) = by_key(acme).get(f"/api/requests/prompt-advice{query}").json()
    assert (row["token_index"], row["cost_usd"], row["key"]) == (12, "0.0000000054", 1)


@pytest.mark.parametrize(
    ("first", "second", "text", "share"),
    [
        ("at 10: rules", "at 11: rules", "0", 7 / 8),
        ("same", "same", "", 0.0),
        ("start", "start and more", "", 0.0),
        ("aaa", "aa", "a", 0.0),
        ("abc", "xyz", "abc", 0.0),
    ],
)
def test_a_change_is_between_the_common_start_and_end(first: str, second: str, text: str, share: float) -> None:
    change = find_change(first, second)
    assert (change.text, change.avoidable_share) == (text, pytest.approx(share))


def test_texts_of_all_dialects_are_read() -> None:
    assert prompt_text('{"system": "a", "messages": [{"content": [{"text": "b"}]}]}') == "a\nb"
    assert prompt_text("[1]") == "[1]"
    assert prompt_text("no JSON") == "no JSON"
