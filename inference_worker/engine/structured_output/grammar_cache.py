"""A cache of compiled grammars by tenant. Does not import torch.

Tenants do not share entries: whether a grammar is cached depends only on what the tenant itself has used, so that no
tenant can measure what another one uses. A tenant's share is bounded. When the whole cache is full, the tenant with the
largest share loses its least recently used entry, so that no tenant can evict the entries of a smaller one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class CacheCapacity:
    """The limits of a cache, or of one tenant in it. A single entry is always stored, whatever its size."""

    bytes: int
    entries: int


@dataclass
class _Share(Generic[Key, Value]):
    """The entries of one tenant with their sizes, least recently used first."""

    entries: OrderedDict[Key, tuple[Value, int]] = field(default_factory=OrderedDict)
    bytes: int = 0

    def part_of(self, limits: CacheCapacity) -> float:
        return max(self.bytes / limits.bytes, len(self.entries) / limits.entries)

    def remove(self, key: Key) -> int:
        """Remove an entry. Return its size."""
        _, size = self.entries.pop(key)
        self.bytes -= size
        return size


class TenantCache(Generic[Key, Value]):
    """Values by tenant and key. All methods may be called from any thread."""

    def __init__(self, total: CacheCapacity, tenant: CacheCapacity) -> None:
        """
        Args:
            total: limits for all tenants together.
            tenant: limits for one tenant.
        """
        self._total, self._tenant = total, tenant
        self._shares: dict[str, _Share[Key, Value]] = {}
        self._bytes = self._entries = 0
        self._lock = threading.Lock()

    def get(self, tenant: str, key: Key) -> Value | None:
        """Return the tenant's value, which becomes its most recently used one."""
        with self._lock:
            share = self._shares.get(tenant)
            entry = share.entries.get(key) if share else None
            if share is None or entry is None:
                return None
            share.entries.move_to_end(key)
            return entry[0]

    def put(self, tenant: str, key: Key, value: Value, size: int) -> None:
        """Store a value of `size` bytes, and evict what exceeds the limits."""
        with self._lock:
            share = self._shares.setdefault(tenant, _Share())
            if key in share.entries:
                self._evict(tenant, key)
                share = self._shares.setdefault(tenant, _Share())
            share.entries[key] = value, size
            share.bytes += size
            self._bytes += size
            self._entries += 1
            while len(share.entries) > 1 and share.part_of(self._tenant) > 1:
                self._evict(tenant, next(iter(share.entries)))
            while self._bytes > self._total.bytes or self._entries > self._total.entries:
                largest = max(
                    (name for name, share in self._shares.items() if name != tenant or len(share.entries) > 1),
                    key=lambda name: self._shares[name].part_of(self._total),
                    default=None,
                )
                if largest is None:
                    return
                self._evict(largest, next(iter(self._shares[largest].entries)))

    def _evict(self, tenant: str, key: Key) -> None:
        share = self._shares[tenant]
        self._bytes -= share.remove(key)
        self._entries -= 1
        if not share.entries:
            del self._shares[tenant]
