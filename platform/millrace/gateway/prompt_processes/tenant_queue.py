"""A queue that serves tenants in turn, with a maximum length for each tenant."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantQueue(Generic[T]):
    """Waiting jobs: in order within a tenant, round robin between tenants."""

    def __init__(self, max_per_tenant: int) -> None:
        self._max_per_tenant = max_per_tenant
        self._waiting: OrderedDict[int, deque[T]] = OrderedDict()
        self._count = asyncio.Semaphore(0)

    def put(self, tenant_id: int, job: T) -> bool:
        """Append the job. Return False if the tenant's queue is full."""
        jobs = self._waiting.setdefault(tenant_id, deque())
        if len(jobs) >= self._max_per_tenant:
            return False
        jobs.append(job)
        self._count.release()
        return True

    async def get(self) -> T:
        """Wait for a job. Return the oldest job of the next tenant."""
        await self._count.acquire()
        tenant_id, jobs = self._waiting.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant_id] = jobs  # at the end of the order
        return job
