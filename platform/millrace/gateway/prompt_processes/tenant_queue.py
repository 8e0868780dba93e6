"""A bounded queue for each tenant, from which tenants are served in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantQueue(Generic[T]):
    """Jobs that wait, in order within a tenant and round robin between tenants."""

    def __init__(self, most: int) -> None:
        self._most = most  # of one tenant
        self._waiting: OrderedDict[int, deque[T]] = OrderedDict()
        self._count = asyncio.Semaphore(0)

    def put(self, tenant_id: int, job: T) -> bool:
        """Append the job. False: the tenant's queue is full."""
        jobs = self._waiting.setdefault(tenant_id, deque())
        if len(jobs) >= self._most:
            return False
        jobs.append(job)
        self._count.release()
        return True

    async def get(self) -> T:
        """Wait for a job, and return the oldest of the tenant whose turn it is."""
        await self._count.acquire()
        tenant_id, jobs = self._waiting.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant_id] = jobs  # behind the other tenants
        return job
