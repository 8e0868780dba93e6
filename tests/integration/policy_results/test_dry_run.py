"""Previews of budgets and limits, and the limits and budgets that apply to a key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
import redis

from billing.models import Budget, BudgetPeriod
from millrace.apps.policy_results.dry_runs import (
    MAX_REQUESTS,
    DryRunScope,
    budget_would_refuse,
    limits_would_refuse,
    refused_counts,
)
from millrace.apps.policy_results.limiting_factor import LimitingFactor, binding
from millrace.gateway.admission.limits import LimitCost, LimitStore, counters_key, make_checks
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.keys.snapshot import LimitSetSnapshot as Compiled
from tenants.models import ApiKey, LimitSet, Project, Tenant, User
from tests.support.billing.books import price, use
from tests.support.rows import of

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
NOW = datetime(2026, 11, 10, 12, tzinfo=UTC)
DOLLAR = 10**9


@pytest.fixture
def broker() -> Iterator[redis.Redis]:
    with redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"]) as client:
        client.flushdb()
        yield client


@pytest.fixture
def week(acme) -> Tenant:
    """Create twenty requests of a dollar, one every six hours, then one of ten cents."""
    line = price("1"), 10**6
    for number in range(20):
        use(acme, NOW - timedelta(hours=6 * number + 1), line)
    use(acme, NOW - timedelta(minutes=1), (line[0], 10**5))
    return acme


@pytest.mark.parametrize(
    ("unit", "period", "amount", "refused"),
    [
        ("money", "day", DOLLAR, 15),  # six days admit one each, and then ten cents do not fit
        ("money", "day", 11 * DOLLAR // 10, 20 - 6),
        ("money", "day", 100 * DOLLAR, 0),
        ("money", "month", 5 * DOLLAR, 16),
        ("money", "lifetime", 20 * DOLLAR, 1),
        ("requests", "day", 2, 9),
        ("tokens", "month", 10**6, 20),
        ("tokens", "month", 0, 21),
    ],
)
def test_the_preview_of_a_budget(week, unit, period, amount, refused):
    with tenant_scope(week):
        tried = budget_would_refuse(DryRunScope(week.pk), unit, period, amount, now=NOW)
    assert (tried.requests, tried.complete) == (21, True)
    assert tried.refused == expected(unit, period, amount) == refused


def expected(unit: str, period: str, amount: int) -> int:
    """Return the expected preview, computed in a simple way."""
    times = [(NOW - timedelta(hours=6 * number + 1), 10**6) for number in reversed(range(20))]
    times.append((NOW - timedelta(minutes=1), 10**5))
    used: dict[Any, int] = {}
    count = 0
    for at, tokens in times:
        window = {"day": at.date(), "month": (at.year, at.month), "lifetime": None}[period]
        needed = {"money": tokens * 1000, "tokens": tokens, "requests": 1}[unit]
        if used.get(window, 0) + needed > amount:
            count += 1
        else:
            used[window] = used.get(window, 0) + needed
    return count


@pytest.mark.parametrize("most_mixed", [0, 1, 20])
@pytest.mark.parametrize("unit", ["money", "tokens", "requests"])
def test_chunks_of_requests_give_the_same_result_as_single_ones(acme, monkeypatch, unit, most_mixed):
    monkeypatch.setattr("millrace.apps.policy_results.dry_runs.MAX_MIXED_CHUNKS", most_mixed)
    random, line = Random(7), price("1")
    made = []
    for number in range(80):
        at, tokens = NOW - timedelta(minutes=5 * number + random.randrange(5), seconds=number % 60), random.randrange(9)
        use(acme, at, (line, tokens))
        made.append((at, tokens))
    with tenant_scope(acme):
        for amount in (0, 3, 11, 40, 200, 1000):
            limit = amount * 1000 if unit == "money" else amount
            for period in ("day", "lifetime"):
                used: dict[Any, int] = {}
                refused = 0
                for at, tokens in sorted(made):
                    window, needed = at.date() if period == "day" else None, 1 if unit == "requests" else tokens
                    if used.get(window, 0) + needed > amount:
                        refused += 1
                    else:
                        used[window] = used.get(window, 0) + needed
                tried = budget_would_refuse(DryRunScope(acme.pk), unit, period, limit, days=1, now=NOW)
                assert (tried.requests, tried.refused) == (80, refused), (amount, period)


def test_earlier_usage_of_the_month_counts(week):
    with tenant_scope(week):
        tried = budget_would_refuse(DryRunScope(week.pk), "money", "month", 19 * DOLLAR, days=1, now=NOW)
    assert (tried.requests, tried.refused) == (5, 2)  # after sixteen, three fit


def test_only_requests_of_the_budgets_owner_count(week):
    with tenant_scope(week):
        assert budget_would_refuse(DryRunScope(week.pk, key_id=1), "money", "day", 0, now=NOW).refused == 21
        for scope in (
            DryRunScope(week.pk, key_id=2),
            DryRunScope(week.pk, project_id=2),
            DryRunScope(week.pk, member_id=9),
        ):
            assert budget_would_refuse(scope, "money", "day", 0, now=NOW).requests == 0
        assert budget_would_refuse(DryRunScope(week.pk), "money", "day", 0, days=1, now=NOW).requests == 5


def test_the_number_of_examined_requests_is_limited(week, monkeypatch):
    monkeypatch.setattr("millrace.apps.policy_results.dry_runs.MAX_REQUESTS", 4)
    assert MAX_REQUESTS > 4
    with tenant_scope(week):
        tried = budget_would_refuse(DryRunScope(week.pk), "requests", "day", 0, now=NOW)
        assert (tried.requests, tried.refused, tried.complete) == (4, 4, False)
        (tried,) = limits_would_refuse(DryRunScope(week.pk), {"requests_per_minute": 0}, now=NOW).values()
        assert (tried.requests, tried.refused, tried.complete) == (4, 4, False)


def test_the_preview_of_limits(acme):
    line, answer = price("1"), price("1", "output")
    for seconds in (0, 0, 0, 20, 40, 3600):
        use(acme, NOW - timedelta(hours=2) + timedelta(seconds=seconds), (line, 100), (answer, 50))
    limits = {
        **{"requests_per_minute": 3, "tokens_per_minute": 300, "requests_per_day": 5, "concurrency": 1},
        **{"max_prompt_tokens": 99, "max_output_tokens": 50, "input_tokens_per_day": 250},
    }
    with tenant_scope(acme):
        tried = limits_would_refuse(DryRunScope(acme.pk), limits, now=NOW)
    assert {name: each.refused for name, each in tried.items()} == {
        **{"requests_per_minute": 0, "tokens_per_minute": 2, "requests_per_day": 1, "concurrency": 0},
        **{"max_prompt_tokens": 6, "max_output_tokens": 0, "input_tokens_per_day": 4},
    }
    with tenant_scope(acme), pytest.raises(KeyError):
        limits_would_refuse(DryRunScope(acme.pk), {"long_prompt_threshold": 1}, now=NOW)


def test_counted_dry_runs(acme, broker):
    broker.hset(counters_key(acme.pk, NOW), mapping={"refused:7:concurrency": 2, "dry:7:concurrency": 3})
    broker.hset(counters_key(acme.pk, NOW - timedelta(days=6)), mapping={"dry:7:concurrency": 4})
    broker.hset(counters_key(acme.pk, NOW - timedelta(days=8)), mapping={"dry:7:concurrency": 50})
    with all_tenants_scope(BypassReason.COMMAND):
        for day, refused in ((0, 5), (1, 6), (30, 70)):
            at = NOW - timedelta(days=day)
            BudgetPeriod.objects.create(tenant_id=acme.pk, budget_id=9, unit="money", period_start=at, rejected=refused)
    with tenant_scope(acme):
        limit, budget = refused_counts(acme.pk, now=NOW)
    assert (limit.kind, limit.id, limit.name, limit.refused, limit.dry) == ("limit", 7, "concurrency", 2, 7)
    assert (budget.kind, budget.id, budget.refused, budget.dry) == ("budget", 9, 0, 11)


# Limits and budgets of a key.


@pytest.fixture
def key(acme) -> ApiKey:
    (project,) = of(Project, acme)
    made, _ = actions.do_create_api_key(project, "k", created_by=User.objects.create_user("a@example.com"))
    return made


def of_key(tenant: Tenant, key: ApiKey) -> tuple[LimitingFactor, ...]:
    with tenant_scope(tenant):
        return binding(tenant.pk, [key])[key.pk]


def test_limits_of_parents_apply_to_a_key(acme, key, broker):
    assert of_key(acme, key) == ()
    actions.do_set_limits(acme, {"requests_per_minute": 10, "max_output_tokens": 99})
    actions.do_set_limits(acme, {"requests_per_minute": 60}, key=key)
    actions.do_set_limits(acme, {"requests_per_minute": 1}, dry_run=True)
    (other,) = of(Project, acme)
    spare = actions.do_create_project(acme, "spare", "Spare")
    actions.do_set_limits(acme, {"requests_per_minute": 2}, project=spare)
    bounds = of_key(acme, key)
    assert other.pk == key.project_id
    assert [(each.scope, each.name, each.limit, each.left) for each in bounds] == [
        ("tenant", "requests_per_minute", 10, 10),
        ("key", "requests_per_minute", 60, 60),
        ("tenant", "max_output_tokens", 99, 99),
    ]


async def take(set_: Compiled, tenant_id: int, times: int) -> None:
    import redis.asyncio as asynchronous

    client = asynchronous.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"])
    store = LimitStore(client)
    for number in range(times):
        checks = make_checks(tenant_id, [set_], LimitCost(1, 10, 20))
        await store.take(tenant_id, f"req_{number}", checks)
    await client.aclose()


def test_amounts_used_by_gateways_are_not_remaining(acme, key, broker):
    from asgiref.sync import async_to_sync

    fields = {"requests_per_day": 100, "concurrency": 8, "tokens_per_day": 1000}
    row: LimitSet = actions.do_set_limits(acme, fields)
    async_to_sync(take)(Compiled(row.pk, "tenant", **fields), acme.pk, 3)
    assert {each.name: each.left for each in of_key(acme, key)} == {
        **{"requests_per_day": 97, "concurrency": 5, "tokens_per_day": 910}
    }


def test_budgets_apply_with_the_remaining_amount_of_their_period(acme, key, broker):
    now = datetime.now(UTC)
    with tenant_scope(acme):
        common = {"tenant": acme, "unit": "money", "period": "month"}
        spent = Budget.objects.create(**common, name="Spent", amount=100, temporary_increase=5, increase_expires_at=now)
        Budget.objects.create(**common, name="Soft", amount=1, mode="soft")
        Budget.objects.create(**common, name="Whole", amount=10, member=key.created_by)
    with all_tenants_scope(BypassReason.COMMAND):
        fields = {"tenant_id": acme.pk, "budget_id": spent.pk, "unit": "money", "rolled_over": 20}
        ends = now + timedelta(days=1)
        BudgetPeriod.objects.create(
            **fields, period_start=now - timedelta(days=1), period_end=ends, used=80 * 10**6 + 1, reserved=9
        )
        BudgetPeriod.objects.create(**fields, period_start=now - timedelta(days=9), period_end=now - timedelta(days=1))
    first, second = of_key(acme, key)
    assert (first.name, first.scope, first.limit, first.left, first.resets_at) == ("Spent", "tenant", 120, 30, ends)
    assert (second.name, second.scope, second.limit, second.left) == ("Whole", "member", 10, 10)


def test_without_the_broker_the_remaining_amount_is_unknown(acme, key, broker, monkeypatch):
    actions.do_set_limits(acme, {"requests_per_minute": 10})

    def gone(*_: object, **__: object) -> None:
        raise redis.ConnectionError

    monkeypatch.setattr("millrace.apps.policy_results.limiting_factor.redis.Redis.from_url", gone)
    assert [(each.limit, each.left) for each in of_key(acme, key)] == [(10, None)]
