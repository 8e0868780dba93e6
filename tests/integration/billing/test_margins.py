"""Cost cards, margins, provider exports and spend limits: exact for each execution, and the same in every sum."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from asgiref.sync import async_to_sync
from django.db import connections
from psycopg_pool import AsyncConnectionPool
from rest_framework.test import APIClient

from billing.costs.lowered_charges import _change
from billing.costs.spend import SpendCheck, SpendStore
from billing.invoicing.setup import do_add_exchange_rate
from billing.metering import rollups
from billing.models import (
    Adjustment,
    CompiledRateCard,
    CostCard,
    DailyCost,
    ExecutionCost,
    PriceBook,
    PriceBookAssignment,
    SpendReservation,
)
from inference_worker.contract.messages import ExecutionUsage
from inference_worker.contract.request import TokenCounts
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, Tenant, UpstreamCredential, User
from tests.support.billing.books import dollars, rate_card
from tests.support.billing.execution_costs import FULL, PAID, PRICE, cost_card, settle_all
from tests.support.gateway.budgets import database_url
from tests.support.invariants import assert_ledger_invariants
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_key, by_person

PUBLIC = Path(__file__).parents[2] / "data" / "prices" / "model_prices_and_context_window.json"
NOW = datetime.now(UTC).replace(microsecond=0)
MONTH = f"{NOW:%Y-%m}"
USD = Decimal(10) ** 15


@pytest.fixture
def operator(table: None) -> APIClient:
    return by_person(User.objects.create_superuser("one@op.example"))


@pytest.fixture
def used(tenant: Tenant, event: Callable[..., ExecutionUsage]) -> Callable[..., ExecutionUsage]:
    """Return a function that makes usage of an upstream by the tenant; the deployment has a cost card."""
    version = unscoped(CompiledRateCard).get().pk
    cost_card()

    def make(**changes: Any) -> ExecutionUsage:
        given = {"at": NOW, "usage_source": "upstream", "price_version": version, "tenant_id": tenant.pk, **FULL}
        return event(**(given | changes))

    return make


def test_public_prices_are_imported_as_costs_with_their_changes(operator: APIClient, tenant: Tenant) -> None:
    name = next(
        name
        for name, fields in json.loads(PUBLIC.read_bytes()).items()
        if fields.get("input_cost_per_token") and fields.get("output_cost_per_token")
    )
    sent = {"file_type": "json", "content": PUBLIC.read_text(), "models": {"mine": name}, "round": True}
    preview = operator.post("/api/operator/costs/import", sent | {"dry_run": True}).json()
    assert unscoped(CostCard).count() == 0
    made = operator.post("/api/operator/costs/import", sent).json()
    assert made["changes"] == preview["changes"]
    assert {row["before_usd_per_million"] for row in made["changes"]} == {None}
    assert operator.post("/api/operator/costs/import", sent).json()["changes"] == []
    (card,) = operator.get("/api/operator/costs").json()
    assert (card["model"], len(card["prices"])) == ("mine", len(made["changes"]))
    csv = "model,tier,component,usd_per_million\nmine,standard,uncached,0.5\nmine,standard,output,2\n"
    changes = operator.post("/api/operator/costs/import", {"file_type": "csv", "content": csv}).json()["changes"]
    assert ("uncached", "0.50") in [(row["component"], row["after_usd_per_million"]) for row in changes]
    assert any(row["after_usd_per_million"] is None for row in changes)
    assert unscoped(CostCard).count() == unscoped(AuditEntry).filter(action="cost_card.created").__len__() == 2
    unknown = operator.post("/api/operator/costs/import", sent | {"models": {"mine": "no such model"}})
    assert (unknown.status_code, "no such model" in unknown.content.decode()) == (400, True)
    past = {"file_type": "csv", "content": csv, "effective_from": "2020-01-01T00:00:00Z"}
    assert operator.post("/api/operator/costs/import", past).status_code == 400
    assert by_key(tenant).get("/api/operator/costs").status_code in (401, 403, 404)


def test_margins_are_exact_for_each_execution_and_in_every_sum(
    operator: APIClient, tenant: Tenant, used: Callable[..., ExecutionUsage]
) -> None:
    settle_all(used(request_id="a"), used(request_id="b", outcome="failed"), used(request_id="c", model="other"))
    rollups.build()
    reserved = PRICE // 2 // 10**6
    late = {"outcome": "failed", "uncached": 0, "output": 0, "usage_source": "engine"}
    settle_all(used(request_id="d", reserved_nano=reserved), used(request_id="e"), used(request_id="e", **late))
    executions = operator.get("/api/operator/costs/executions").json()["results"]
    by_request = {row["request_id"]: row for row in executions}
    costs = {name: Decimal(row["cost_usd"]) * USD for name, row in by_request.items()}
    assert costs == dict.fromkeys("abde", PAID) | {"c": 0}
    assert (by_request["b"]["revenue_usd"], by_request["e"]["revenue_usd"]) == ("0.00", "0.00")
    assert Decimal(by_request["a"]["margin_usd"]) * USD == PRICE - PAID
    for groups in ("month,tenant,model", "tenant", "model", ""):
        found = operator.get("/api/operator/margins", {"group_by": groups}).json()
        for name in ("revenue_usd", "cost_usd", "margin_usd", "unbilled_usd"):
            counted = [row for row in executions if name != "margin_usd" or Decimal(row["cost_usd"])]
            total = sum(Decimal(row[name]) for row in counted)
            assert Decimal(found["total"][name]) == sum(Decimal(row[name]) for row in found["rows"]) == total
    row = operator.get("/api/operator/margins", {"model": "smollm2-135m", "from_month": MONTH}).json()["rows"][0]
    assert (row["tenant"], row["month"], row["executions"], row["costed"]) == ("acme", MONTH, 4, 4)
    assert Decimal(row["failed_usd"]) * USD == PAID
    text = operator.get("/api/operator/margins", {"format": "csv"}).content.decode()
    assert text.splitlines()[0].startswith("month,tenant_id,tenant,model,executions")
    assert len(text.splitlines()) == 3
    assert operator.get("/api/operator/margins", {"from_month": "2026-13"}).status_code == 400
    events = by_key(tenant).get("/api/usage/events").json()["results"]
    assert {row["usage_source"] for row in events if row["request_id"] != "e"} == {"upstream"}
    assert {row["request_id"] for row in events if row["unbilled_tokens"]} == {"d"}
    assert_ledger_invariants(database_url())


def test_revenue_in_another_currency_is_converted_to_dollars(
    operator: APIClient, tenant: Tenant, used: Callable[..., ExecutionUsage]
) -> None:
    """Half a euro per dollar: revenue in euros is worth twice the dollars. Without a rate it counts as 0."""
    with all_tenants_scope(BypassReason.PRICES):
        book = PriceBook.objects.create(name="eur", currency="EUR")
        PriceBookAssignment.objects.create(tenant=tenant, book=book)
    settle_all(used(request_id="a"))
    found = operator.get("/api/operator/margins").json()["total"]
    assert (found["revenue_usd"], Decimal(found["margin_usd"]) * USD) == ("0.00", -PAID)
    do_add_exchange_rate(currency="EUR", on=date(2020, 1, 1), micro_per_usd=500_000)
    found = operator.get("/api/operator/margins").json()["total"]
    (row,) = operator.get("/api/operator/costs/executions").json()["results"]
    for shown in (found, row):
        assert Decimal(shown["revenue_usd"]) * USD == 2 * PRICE
        assert Decimal(shown["margin_usd"]) * USD == 2 * PRICE - PAID


def test_a_tenants_own_credential_costs_the_operator_nothing(
    tenant: Tenant, used: Callable[..., ExecutionUsage]
) -> None:
    own, shared = (
        unscoped(UpstreamCredential).create(tenant=owner, name="k", ciphertext=b"x", encryption_key_id="k")
        for owner in (tenant, None)
    )
    settle_all(
        used(request_id="own", credential=own.pk, is_tenant_credential=True),
        used(request_id="shared", credential=shared.pk),
    )
    with all_tenants_scope(BypassReason.COMMAND):
        UpstreamCredential.objects.all_tenants().delete()  # the usage may be settled later
    settle_all(
        used(request_id="own2", credential=own.pk, is_tenant_credential=True),
        used(request_id="shared2", credential=shared.pk),
    )
    rows = {row.request_id: (row.is_tenant_credential, int(row.cost_femto)) for row in unscoped(ExecutionCost).all()}
    assert rows == {"own": (True, 0), "shared": (False, PAID), "own2": (True, 0), "shared2": (False, PAID)}


def export(*rows: str) -> dict[str, Any]:
    lines = ["date,model,request_id,prompt_tokens,cached_tokens,completion_tokens,spend", *rows]
    return {"content": "\n".join(lines), "models": {"smollm2-135m": "gpt-x"}}


def test_a_provider_export_lowers_charges_and_never_raises_them(
    operator: APIClient, used: Callable[..., ExecutionUsage]
) -> None:
    names = ("same", "less", "more", "cached", "estimated", "unknown")
    settle_all(*(used(request_id=name) for name in names[:-1]), used(request_id="missing"))
    day = f"{NOW:%Y-%m-%d}"
    cost = f"{PAID / USD:f}"
    rows = export(
        f"{day},gpt-x,same,1000,0,200,{cost}",
        f"{day},gpt-x,less,900,0,150,0.001",
        f"{day},gpt-x,more,1000,0,999,{cost}",
        f"{day},gpt-x,cached,1000,600,200,",
        f"{day},gpt-x,estimated,1000,,190,",
        f"{day},gpt-x,unknown,5,0,5,0",
        f"{day},other,,7,0,7,0",
    )
    lists = operator.post("/api/operator/provider-exports", rows).json()
    assert (lists["days"], lists["requests"], unscoped(Adjustment).count()) == (2, 6, 0)
    found = {row["request_id"]: row for row in lists["differences"] if row["request_id"]}
    assert found.keys() == {"less", "more", "cached", "estimated", "unknown", "missing"}
    assert (found["missing"]["provider"], found["unknown"]["booked"]) == (None, None)
    credits = {
        "less": 100 * dollars("3") + 50 * dollars("15"),
        "cached": 600 * (dollars("3") - dollars("0.30")),
        "estimated": 10 * dollars("15"),
    }
    for _ in range(2):
        applied = operator.post("/api/operator/provider-exports", rows | {"apply": True}).json()
        rows_of = {row["request_id"]: row for row in applied["differences"]}
        assert {name for name, row in rows_of.items() if row["is_credited"]} == credits.keys()
        adjusted = {row.request_id: row for row in unscoped(Adjustment).all()}
        assert {name: -int(row.cost_femto) for name, row in adjusted.items()} == credits
        assert {row.outcome for row in adjusted.values()} == {"reconciled"}
        assert_ledger_invariants(database_url())
    assert (adjusted["cached"].uncached, adjusted["cached"].cache_read) == (-600, 600)
    settle_all(used(request_id="less", outcome="failed", uncached=0, output=0, usage_source="engine"))
    assert_ledger_invariants(database_url())  # the failure takes back the rest
    for bad in ("2026-11-01,gpt-x,r,-1,0,5,0", "yesterday,gpt-x,r,1,0,5,0", "2026-11-01,gpt-x,r,1,2,5,0"):
        response = operator.post("/api/operator/provider-exports", export(bad))
        assert (response.status_code, "line 2" in response.content.decode()) == (400, True)


def test_a_lowered_charge_keeps_its_searches(operator: APIClient, used: Callable[..., ExecutionUsage]) -> None:
    """A provider's export has no searches, so those of a cross-encoder stay charged."""
    version = rate_card("ranker", uncached="3", output="15", searches="2000")
    given = {"model": "ranker", "price_version": version, "output": 0, "searches": 3}
    settle_all(*(used(request_id=name, **given) for name in ("less", "same")))
    day = f"{NOW:%Y-%m-%d}"
    rows = export(f"{day},gpt-x,less,900,0,0,", f"{day},gpt-x,same,1000,0,0,") | {"models": {"ranker": "gpt-x"}}
    operator.post("/api/operator/provider-exports", rows | {"apply": True})
    (adjusted,) = unscoped(Adjustment).all()
    assert (adjusted.request_id, adjusted.uncached, adjusted.searches) == ("less", -100, 0)
    assert int(adjusted.cost_femto) == -100 * dollars("3")
    assert adjusted.price_ids is not None
    assert [pk is not None for pk in adjusted.price_ids] == [True, *[False] * 7]
    assert_ledger_invariants(database_url())


@pytest.mark.parametrize("searches", [0, 2, 3, 9])
def test_a_change_of_a_charge_has_no_searches(searches: int) -> None:
    charged = (100, 10, 0, 0, 50, 0, 0, 3)
    counted = TokenCounts(90, 15, output=40, searches=searches)
    assert _change(charged, counted, has_read_price=True) == (-10, 5, 0, 0, -10, 0, 0, 0)


def test_concurrent_comparisons_credit_once(operator: APIClient, used: Callable[..., ExecutionUsage]) -> None:
    settle_all(*(used(request_id=f"r{number}") for number in range(8)))
    rows = export(*(f"{NOW:%Y-%m-%d},gpt-x,r{number},900,0,200," for number in range(8))) | {"apply": True}

    def run(_: int) -> int:
        status = operator.post("/api/operator/provider-exports", rows).status_code
        connections.close_all()
        return status

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(run, range(3))) == {200}
    assert len(unscoped(Adjustment).all()) == 8
    assert_ledger_invariants(database_url())


def test_spend_is_reserved_up_to_the_daily_limit_and_settled_once(
    operator: APIClient, used: Callable[..., ExecutionUsage]
) -> None:
    at, nano, limit = int(NOW.timestamp()) * 10**6, PAID // 10**6, 3 * PAID // 10**6
    given = {"tenant": None, "ciphertext": b"x", "encryption_key_id": "k"}
    pk, free = (
        unscoped(UpstreamCredential).create(name=name, daily_spend_limit_nano=nanos, **given).pk
        for name, nanos in (("k", limit), ("free", 0))
    )

    async def with_store(work: Callable[[SpendStore], Any]) -> Any:
        async with AsyncConnectionPool(
            database_url(), min_size=1, max_size=4, open=False, kwargs={"autocommit": True}
        ) as pool:
            store = SpendStore(pool, 60.0)
            await store.load()
            return await work(store)

    async def reserve_many(store: SpendStore) -> list[SpendCheck]:
        assert store.max_nano("smollm2-135m", 1000, 200, at) == nano
        assert store.max_nano("without a card", 1000, 200, at) == 0
        return list(await asyncio.gather(*(store.reserve(pk, at, f"r{n % 8}", 0, nano) for n in range(16))))

    checks = async_to_sync(with_store)(reserve_many)
    assert len({row.request_id for row in unscoped(SpendReservation).all()}) == 3
    assert sum(check.is_reserved for check in checks) in (3, 4, 5, 6)  # repeated calls find their reservation
    assert checks[0].resets_at == NOW.replace(hour=0, minute=0, second=0) + timedelta(days=1)
    first, second, third = (row.request_id for row in unscoped(SpendReservation).order_by("request_id"))
    settle_all(
        used(request_id=first, credential=pk),
        used(request_id=second, credential=pk, outcome="cancelled", uncached=0, output=0, usage_source="engine"),
    )
    settle_all(used(request_id=first, credential=pk))
    assert [row.request_id for row in unscoped(SpendReservation).all()] == [third]
    spend = operator.get("/api/operator/spend", {"day": f"{NOW:%Y-%m-%d}"}).json()
    assert spend == [
        {"credential_id": pk, "executions": 1, "spent_usd": f"{PAID / USD:f}", "reserved_usd": f"{PAID / USD:f}"}
    ]

    async def again(store: SpendStore) -> list[bool]:
        found = [(await store.reserve(pk, at, f"n{n}", 0, nano)).is_reserved for n in range(2)]
        found.append((await store.reserve(pk, at, "n0", 0, nano)).is_reserved)  # repeated
        await store.release(at, "n0", 0)
        found.append((await store.reserve(pk, at, "n3", 0, nano)).is_reserved)
        tomorrow = at + 86_400 * 10**6
        found.append((await store.reserve(pk, tomorrow, "n4", 0, limit)).is_reserved)
        found.append((await store.reserve(free, at, "n5", 0, 0)).is_reserved)
        return found

    assert async_to_sync(with_store)(again) == [True, False, True, True, True, True]
    with psycopg.connect(database_url(), autocommit=True) as connection:
        connection.execute("UPDATE billing_spendreservation SET expires_at = now()")

    async def after_expiry(store: SpendStore) -> list[bool]:
        return [(await store.reserve(pk, at, f"x{n}", 0, nano)).is_reserved for n in range(3)]

    assert async_to_sync(with_store)(after_expiry) == [True, True, False]
    assert unscoped(DailyCost).get().cost_femto == PAID
