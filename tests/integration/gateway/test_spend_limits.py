"""Daily spend limits of upstream credentials at the admission: exact, and given back by what is not admitted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import redis.asyncio as redis
from asgiref.sync import sync_to_async
from psycopg_pool import AsyncConnectionPool

from billing.costs.spend import SpendStore
from billing.models import SpendReservation
from inference_worker.contract.request import TokenCounts
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from millrace.gateway.admission.budget_admission import RequestAdmission
from millrace.gateway.admission.spend_limits import SpendLimits
from millrace.gateway.core.errors import ApiError
from millrace.gateway.lifecycle.active_request import FALLBACK
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.models import UpstreamCredential
from tests.support.billing.execution_costs import cost_card
from tests.support.gateway.budget_gateways import MODEL
from tests.support.gateway.keys import make_demand
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db(transaction=True)
MAX_NANO = 1000 * 1000 + 100 * 5000  # of 1,000 prompt tokens and 100 output tokens, in nano-USD


def reservations() -> list[str]:
    return sorted(row.request_id for row in unscoped(SpendReservation).all())


async def test_a_credentials_daily_limit_rejects_and_is_given_back(
    url: str, key: ApiKeySnapshot, gateway: Callable[..., Any], budget: Callable[..., int], async_broker: redis.Redis
) -> None:
    given = {"name": "k", "ciphertext": b"x", "encryption_key_id": "k", "daily_spend_limit_nano": 2 * MAX_NANO}
    credential = await sync_to_async(unscoped(UpstreamCredential).create)(tenant=None, **given)
    await sync_to_async(cost_card)()
    budgets = (await gateway()).budget_admission
    async with AsyncConnectionPool(url, min_size=1, max_size=2, open=False, kwargs={"autocommit": True}) as pool:
        store = SpendStore(pool, 60.0)
        await store.load()
        admission = RequestAdmission(async_broker, budgets, spend_limits=SpendLimits(store))
        spec = UpstreamSpec(UpstreamEngine.OPENAI, "https://api.example/v1", "m", credential=credential.pk)
        model = dataclasses.replace(MODEL, upstream=spec)

        async def admit(name: str, of: ApiKeySnapshot = key, **fields: Any) -> Any:
            at = time.time_ns() // 1000
            demand = make_demand(of, name, 1000, 100, MODEL.name, models=[model], admitted_at=at, **fields)
            try:
                return await admission.admit(demand)
            except ApiError as exc:
                return exc

        await admit("a")
        await sync_to_async(budget)(amount=1)  # the tenant's budget rejects it, after its spend was reserved
        budgets.forget()
        refused = await admit("b")
        assert (refused.code, await sync_to_async(reservations)()) == ("budget_exceeded", ["a"])
        other = msgspec.structs.replace(key, key_id=key.key_id + 1, tenant_id=key.tenant_id + 1)
        await admit("c", other)
        full = await admit("d", other)
        assert (full.code, full.status, FALLBACK[full.code]) == ("upstream_limit_reached", 429, "overload")
        assert 0 < full.retry_after <= 86_400
        own = msgspec.structs.replace(other, credentials={MODEL.name: 99})
        admitted = await admit("e", own)
        assert not isinstance(admitted, ApiError)
        assert await sync_to_async(reservations)() == ["a", "c"]
        await admission.close(admitted, TokenCounts())
