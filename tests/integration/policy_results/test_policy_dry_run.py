"""Dry runs of routing policies: targets, costs and latencies of recent requests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from millrace.apps.policy_results.policy_dry_runs import PolicyDryRun, dry_run
from millrace.apps.request_log.models import RequestRecord
from tenants import actions
from tenants.isolation.scopes import tenant_scope
from tenants.models import Tenant
from tenants.routing_policies.policy import parse
from tests.support.billing.books import price, rate_card, use

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("all_models_served"), pytest.mark.acme(months=True)]
COMPONENTS = ("uncached", "cache_read", "output")


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    for model, usd in (("small", "1"), ("large", "10")):
        rate_card(model, **dict.fromkeys(COMPONENTS, usd))
    return acme


def record(tenant: Tenant, number: int, tokens: int, **changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        **{"project_id": 1, "key_id": 1, "gateway_id": "gw", "endpoint": "chat.completions", "stream": False},
        **{"requested_model": "mine", "served_model": "large", "status": "200", "code": "", "outcome": "completed"},
        **{"total_ms": 900, "ttft_ms": 400, "prompt_tokens": tokens, "route": {"targets": ["large"], "facts": {}}},
    }
    at = datetime.now(UTC) - timedelta(minutes=number)
    with tenant_scope(tenant):
        return RequestRecord.objects.create(
            tenant_id=tenant.pk, request_id=f"req_{number}", started_at=at, **fields | changes
        )


def run(tenant: Tenant, body: dict[str, Any], name: str | None = "mine", **options: Any) -> PolicyDryRun:
    with tenant_scope(tenant):
        return dry_run(tenant.pk, parse(body), name, **options)


SHORT_TO_SMALL = {
    "rules": [
        {"when": {"prompt_tokens": {"at_most": 100}}, "targets": [{"model": "small"}]},
        {"when": {"tools": False}, "targets": [{"model": "large"}]},
    ]
}


def test_each_request_is_decided_by_its_recorded_properties(acme):
    for number in range(3):
        record(acme, number, 50)
    record(acme, 3, 500)
    record(acme, 4, 500, route={"targets": ["large"], "facts": {"tools": True}})
    record(acme, 5, 500, route={"targets": ["large"]})  # recorded by an earlier release
    record(acme, 6, 50, requested_model="other")
    found = run(acme, SHORT_TO_SMALL)
    assert (found.requests, found.undecided, found.unmatched) == (6, 1, 1)
    assert dict(found.rules) == {0: 3, 1: 1}
    assert dict(found.moves) == {("large", "small"): 3, ("large", ""): 1}
    assert found.shares == [("small", 0, 3), ("large", 5, 1)]
    assert run(acme, SHORT_TO_SMALL, None).requests == 7
    assert run(acme, SHORT_TO_SMALL, max_requests=2).requests == 2


def test_requests_that_move_are_priced_by_the_rate_card_of_the_other_target(acme):
    moved, stays = record(acme, 1, 50), record(acme, 2, 500)
    line = price("10", model="large", number=11)
    for each in (moved, stays):
        use(acme, each.started_at, (line, 1000), request_id=each.request_id)
    before = 2 * 1000 * 10 * 10**9
    found = run(acme, SHORT_TO_SMALL)
    assert (found.priced, found.cost_femto) == (2, before)
    assert found.new_cost_femto == before * 11 // 20  # the half that moves costs a tenth


def test_latency_of_a_request_that_moves_is_the_other_targets_median(acme):
    for number, ttft_ms in enumerate((100, 120, 140)):
        record(acme, number, 1, requested_model="small", served_model="small", ttft_ms=ttft_ms)
    record(acme, 5, 50)
    record(acme, 6, 500, ttft_ms=500)
    found = run(acme, SHORT_TO_SMALL)
    assert (found.ttft_ms or ())[0] == 450
    assert (found.new_ttft_ms or ())[0] == 310
    fastest = {"rules": [{"strategy": "lowest_latency", "targets": [{"model": "large"}, {"model": "small"}]}]}
    assert found.requests == 2
    assert run(acme, fastest).moves[("large", "small")] >= 1


def test_the_success_rate_is_expected_by_those_of_the_models(acme):
    assert run(acme, SHORT_TO_SMALL).success_rate is None
    for number in range(4):
        record(
            acme, number, 1, requested_model="small", served_model="small", outcome="completed" if number else "failed"
        )
    record(acme, 5, 50)
    record(acme, 6, 500)
    found = run(acme, SHORT_TO_SMALL)
    assert (found.success_rate, found.new_success_rate) == (1.0, (0.75 + 1.0) / 2)


def test_a_score_of_another_classifier_is_undecided(acme):
    classifier = {"weights": "AAAA", "scale": 1.0, "lengths": [0.0] * 5, "bias": 0.0}
    body = {
        "complexity": classifier,
        "rules": [
            {"when": {"complexity": {"at_most": 400}}, "targets": [{"model": "small"}]},
            {"targets": [{"model": "large"}]},
        ],
    }
    fingerprint = parse(body).complexity.fingerprint
    for number, (name, score) in enumerate(((fingerprint, 300), (fingerprint, 500), ("other", 300))):
        route = {"targets": ["large"], "facts": {"complexity": score}, "classifier": name}
        record(acme, number, 50, route=route)
    found = run(acme, body)
    assert (found.undecided, dict(found.moves)) == (1, {("large", "small"): 1})


def test_the_cheapest_target_is_known_from_the_rate_cards(acme):
    record(acme, 1, 50)
    body = {"rules": [{"strategy": "cheapest", "targets": [{"model": "large"}, {"model": "small"}]}]}
    assert dict(run(acme, body).moves) == {("large", "small"): 1}


def test_conditions_on_unrecorded_metadata_are_undecided(acme):
    route = {"targets": ["large"], "facts": {"metadata": {"team": "a"}}}
    record(acme, 1, 50, route=route)
    record(acme, 2, 50)
    body = {"rules": [{"when": {"metadata": {"team": ["a"]}}, "targets": [{"model": "small"}]}]}
    found = run(acme, body)
    assert (found.undecided, dict(found.moves)) == (1, {("large", "small"): 1})
    assert run(acme, {"rules": [{"when": {"budget_left": {"at_most": 5}}, "targets": [{"model": "a"}]}]}).undecided == 2


def test_other_tenants_requests_are_not_decided(acme):
    record(actions.do_create_tenant("other", "Other"), 1, 50)
    assert run(acme, SHORT_TO_SMALL, None).requests == 0
