"""The memory of large request bodies, from their first byte until their prompts are tokenized."""

from __future__ import annotations

from collections import Counter
from types import TracebackType

from millrace.gateway.core.errors import OVERLOADED, ApiError

MAX_TENANT_BYTES = 16 * 2**20
MAX_BYTES = 64 * 2**20


class BodyMemory:
    """Bytes of large bodies in this process. A tenant may have a fixed part, and no more than what is still free."""

    def __init__(self) -> None:
        self._by_tenant: Counter[int] = Counter()
        self.used = 0

    def lease(self, tenant_id: int) -> BodyLease:
        """Return a lease of nothing yet, for one body."""
        return BodyLease(self, tenant_id)

    def reserve(self, tenant_id: int, size: int) -> None:
        """Count `size` bytes more of the tenant.

        Raises:
            ApiError: 429 or 503, the tenant, or all, have too many already.
        """
        used = self._by_tenant.get(tenant_id, 0)
        if used and used + size > min(MAX_TENANT_BYTES, MAX_BYTES - self.used):
            message = f"Your large requests may have {MAX_TENANT_BYTES} bytes in all until they are tokenized."
            raise ApiError("rate_limit_exceeded", message, retry_after=1)
        if self.used and self.used + size > MAX_BYTES + MAX_TENANT_BYTES:
            raise ApiError(OVERLOADED, "Too many large requests are being read.", retry_after=1)
        self._by_tenant[tenant_id] = used + size
        self.used += size

    def release(self, tenant_id: int, size: int) -> None:
        """Count `size` bytes less of the tenant."""
        self.used -= size
        self._by_tenant[tenant_id] -= size
        if not self._by_tenant[tenant_id]:
            del self._by_tenant[tenant_id]


class BodyLease:
    """What one body has of the memory."""

    def __init__(self, memory: BodyMemory, tenant_id: int) -> None:
        self._memory = memory
        self._tenant_id = tenant_id
        self._size = 0

    def grow(self, size: int) -> None:
        """Have at least `size` bytes.

        Raises:
            ApiError: 429 or 503, there is no room for more.
        """
        if size > self._size:
            self._memory.reserve(self._tenant_id, size - self._size)
            self._size = size

    def release(self) -> None:
        """Give the memory back. May be called twice."""
        if self._size:
            self._memory.release(self._tenant_id, self._size)
            self._size = 0

    def __enter__(self) -> BodyLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        self.release()
