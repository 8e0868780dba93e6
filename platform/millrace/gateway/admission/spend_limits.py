"""Admission by the daily spend limits of upstream credentials: the maximum cost is reserved in PostgreSQL.

A request that exceeds the limit falls back like one to an overloaded model, or is rejected with 429 until the next UTC
day. Deployments whose credential has no limit need no database access. A tenant's own credential has none.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import psycopg
import structlog
from psycopg_pool import PoolTimeout

from billing.costs.spend import SpendStore
from millrace.gateway.admission import rejections
from millrace.gateway.admission.admission import AdmissionRequest, AdmittedRequest
from millrace.gateway.core.activity import Activity, Poll
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.errors import unavailable

log = structlog.get_logger(__name__)

LOAD_SECONDS = 1.0
_UNREACHABLE = (psycopg.Error, PoolTimeout, TimeoutError, OSError)


class SpendLimits:
    """The daily spend limits of one gateway."""

    def __init__(self, store: SpendStore, activity: Activity | None = None) -> None:
        self._store = store
        self._pauses = Poll(activity)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self._load()  # so that the first requests are limited
        self._tasks = [asyncio.create_task(self._keep_loaded())]

    async def stop(self) -> None:
        await cancel_and_wait(self._tasks)

    async def reserve(self, admitted: AdmittedRequest) -> None:
        """Reserve the maximum cost of an execution, if its credential has a limit.

        Raises:
            ApiError: 429, the limit does not allow it; 503, the database is unavailable.
        """
        demand = admitted.demand
        credential = limited_credential(demand, self._store)
        if credential is None:
            return
        output = admitted.max_tokens * demand.sequences
        nano = self._store.max_nano(demand.model.name, demand.prompt_tokens, output, demand.admitted_at)
        try:
            check = await self._store.reserve(credential, demand.admitted_at, demand.request_id, demand.execution, nano)
        except _UNREACHABLE as exc:
            log.warning("spend_limits_unreachable", error=str(exc) or type(exc).__name__)
            raise unavailable() from exc
        if not check.is_reserved:
            log.warning("spend_limit_reached", credential=credential, model=demand.model.name)
            seconds = (check.resets_at - datetime.now(UTC)).total_seconds()
            raise rejections.spend_limit_reached(demand.model.name, max(1.0, seconds))

    async def release(self, admitted: AdmittedRequest) -> None:
        """Release the reservation of an execution that is not admitted. If that fails, the reservation expires."""
        demand = admitted.demand
        if limited_credential(demand, self._store) is None:
            return
        try:
            await self._store.release(demand.admitted_at, demand.request_id, demand.execution)
        except _UNREACHABLE as exc:
            log.warning("spend_release_failed", request_id=demand.request_id, error=str(exc) or type(exc).__name__)

    async def _keep_loaded(self) -> None:
        while True:
            await self._pauses.pause(LOAD_SECONDS)
            await self._load()

    async def _load(self) -> None:
        try:
            await self._store.load()
        except _UNREACHABLE as exc:
            log.warning("spend_limits_unreadable", error=str(exc) or type(exc).__name__)


def limited_credential(demand: AdmissionRequest, store: SpendStore) -> int | None:
    """Return the credential of the request's upstream if it has a limit. A tenant's own credential replaces it."""
    upstream = demand.model.upstream
    if upstream is None or upstream.credential is None or demand.model.name in demand.key.credentials:
        return None
    return upstream.credential if upstream.credential in store.limits else None
