"""Budget admission of gateways without their other parts, in this process or in others."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio as redis
from psycopg_pool import AsyncConnectionPool

from billing.reservations.budget_leases import BudgetLeaseStore
from inference_worker.contract.messages import ExecutionUsage, encode
from inference_worker.contract.request import TokenCounts
from millrace.gateway.admission.admission import AdmittedRequest
from millrace.gateway.admission.budget_admission import BudgetAdmission
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from tenants.keys.snapshot import ApiKeySnapshot, LimitSnapshot
from tests.support.gateway.keys import make_demand
from tests.support.waiting import eventually_async

MODEL = ServedModel("smollm2-135m", None, 200_000, 1000, 0)  # type: ignore[arg-type]  # no tokenizer
REQUEST_SECONDS = 2.0
MEETING_SECONDS = 90.0  # less than a test's timeout, so that a lost wait fails instead of hanging


class Admitted(AdmittedRequest):
    """An admitted request, with its usage events."""

    def event(self, outcome: str = "completed", **usage: int) -> ExecutionUsage:
        counts = TokenCounts(**(usage or {"uncached": 1000, "cache_read": 9000, "output": 500}))
        return ExecutionUsage(self.billing_context, 1, outcome, "stop", counts, "r", 32)


@dataclass
class BudgetGateway:
    """One gateway's budget admission."""

    budget_admission: BudgetAdmission
    key: ApiKeySnapshot
    name: str
    count: int = 0

    async def admit(self, prompt: int = 10_000, max_tokens: int | None = 4096, **more: Any) -> Admitted | ApiError:
        """Return the admission or the rejection. A request without `max_tokens` prefers 4,096."""
        self.count += 1
        name, at = f"req_{self.name}_{self.count}", more.pop("at", time.time_ns() // 1000)
        models = more.pop("models", [MODEL])
        demand = make_demand(self.key, name, prompt, max_tokens, MODEL.name, models=models, admitted_at=at, **more)
        try:
            estimate = self.budget_admission.estimate(demand)
            admitted = await self.budget_admission.take(estimate, Admitted(demand, max_tokens or 4096))
        except ApiError as exc:
            return exc
        assert isinstance(admitted, Admitted)
        return admitted

    async def end(self, admitted: Admitted, **usage: int) -> ExecutionUsage:
        """End a request and return its usage event, which is not settled yet."""
        event = admitted.event(**usage)
        await self.budget_admission.early.end(admitted, event.usage)
        return event

    async def admit_with_retries(self, **asked: Any) -> Admitted | ApiError:
        """Admit a request and retry on 503, as SDKs do."""
        while isinstance(found := await self.admit(**asked), ApiError) and found.status == 503:
            await asyncio.sleep(0.2)
        return found

    async def wait_until_returned(self) -> None:
        """Wait until the gateway neither leases nor has leases to return."""
        await eventually_async(lambda: not (self.budget_admission._leasing or self.budget_admission._unreturned))


@dataclass(frozen=True)
class Meeting:
    """A barrier of processes, however long each takes to start."""

    number: int
    name: str = field(default_factory=lambda: f"meeting:{secrets.token_hex(8)}")

    async def all_have_come(self, to: str) -> None:
        async with redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"]) as broker:
            await broker.incr(f"{self.name}:{to}")

            async def have_come() -> bool:
                return int(await broker.get(f"{self.name}:{to}")) >= self.number

            await eventually_async(have_come)


def key_of(tenant_id: int, project_id: int, key_id: int) -> ApiKeySnapshot:
    return ApiKeySnapshot(key_id, tenant_id, project_id, ("inference",), None, None, False, False, LimitSnapshot(()), 1)


@asynccontextmanager
async def budget_gateway(url: str, key: ApiKeySnapshot, name: str = "gw-a") -> AsyncIterator[BudgetGateway]:
    """Start a gateway's budget admission. Its leases are not returned at the end, as if the gateway died."""
    broker = redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"])
    async with AsyncConnectionPool(url, min_size=1, max_size=3, open=False, kwargs={"autocommit": True}) as pool:
        await pool.wait(timeout=30)
        store = BudgetLeaseStore(pool, name, REQUEST_SECONDS)
        budget_admission = BudgetAdmission(store, broker, broker)
        await store.load_prices(budget_admission.prices)
        budget_admission.note_poll(float("inf"))  # the tests apply changes
        await budget_admission.start()
        await asyncio.sleep(0.05)  # it listens now or at the next attempt
        try:
            yield BudgetGateway(budget_admission, key, name)
        finally:
            await cancel_and_wait(budget_admission._tasks)
            await broker.aclose()


def admit_elsewhere(url: str, key: ApiKeySnapshot, name: str, number: int, meeting: Meeting) -> Sequence[Any]:
    """Admit concurrent requests in a separate process and yield their usage events of 500 tokens, or rejections."""

    async def run() -> list[Any]:
        async with asyncio.timeout(MEETING_SECONDS), budget_gateway(url, key, name) as gateway:
            await meeting.all_have_come("begin")
            found = await asyncio.gather(*(gateway.admit_with_retries() for _ in range(number)))
            # The rest of an ended gateway's lease cannot be recalled, and the others would wait for it.
            await meeting.all_have_come("end")
            return [encode(each.event()) if isinstance(each, Admitted) else each.code for each in found]

    return asyncio.run(run())
