"""The memory of large request bodies, from their first byte until their prompts are tokenized."""

from __future__ import annotations

from collections import Counter
from types import TracebackType

from millrace.gateway.core.errors import OVERLOADED, ApiError

MAX_TENANT_BYTES = 16 * 2**20
MAX_BYTES = 64 * 2**20


class BodyMemory:
    """Bytes of large request bodies in this process, limited for each tenant and in total."""

    def __init__(self) -> None:
        self._by_tenant: Counter[int] = Counter()
        self.used = 0

    def lease(self, tenant_id: int) -> BodyLease:
        """Return an empty lease for one body."""
        return BodyLease(self, tenant_id)

    def reserve(self, tenant_id: int, size: int) -> None:
        """Add `size` bytes to the tenant's usage.

        Raises:
            ApiError: 429, the tenant's limit is reached; 503, the limit of this process is reached.
        """
        used = self._by_tenant.get(tenant_id, 0)
        if used and used + size > min(MAX_TENANT_BYTES, MAX_BYTES - self.used):
            message = f"Your large requests may total {MAX_TENANT_BYTES} bytes before they are tokenized. Retry later."
            raise ApiError("rate_limit_exceeded", message, retry_after=1)
        if self.used and self.used + size > MAX_BYTES + MAX_TENANT_BYTES:
            raise ApiError(OVERLOADED, "Too many large requests are being read. Retry later.", retry_after=1)
        self._by_tenant[tenant_id] = used + size
        self.used += size

    def release(self, tenant_id: int, size: int) -> None:
        """Subtract `size` bytes from the tenant's usage."""
        self.used -= size
        self._by_tenant[tenant_id] -= size
        if not self._by_tenant[tenant_id]:
            del self._by_tenant[tenant_id]


class BodyLease:
    """The memory that is reserved for one request body."""

    def __init__(self, memory: BodyMemory, tenant_id: int) -> None:
        self._memory = memory
        self._tenant_id = tenant_id
        self._size = 0

    def grow(self, size: int) -> None:
        """Grow the lease to at least `size` bytes.

        Raises:
            ApiError: 429 or 503, the limit of the tenant or of this process is reached.
        """
        if size > self._size:
            self._memory.reserve(self._tenant_id, size - self._size)
            self._size = size

    def release(self) -> None:
        """Release the reserved memory. Can be called twice."""
        if self._size:
            self._memory.release(self._tenant_id, self._size)
            self._size = 0

    def __enter__(self) -> BodyLease:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
