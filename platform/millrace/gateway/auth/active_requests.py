"""The requests under way in this gateway, by the key they run on: so that they end with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from millrace.gateway.core.errors import ApiError
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.outbox.change_feed import ChangeEvent

End = Callable[[ApiError], None]


class ActiveRequests:
    """Who is to be told when a key dies."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, set[End]]] = {}  # key -> its tenant, and what ends its requests

    def add(self, key: ApiKeySnapshot, end: End) -> None:
        self._ends.setdefault(key.key_id, (key.tenant_id, set()))[1].add(end)

    def remove(self, key: ApiKeySnapshot, end: End) -> None:
        _, ends = self._ends.get(key.key_id, (0, set()))
        ends.discard(end)
        if not ends:
            self._ends.pop(key.key_id, None)

    @contextmanager
    def listed(self, key: ApiKeySnapshot, end: End) -> Iterator[None]:
        self.add(key, end)
        try:
            yield
        finally:
            self.remove(key, end)

    def touched(self, changes: Collection[ChangeEvent]) -> set[int]:
        """Return the keys with requests under way that the changes are about."""
        keys = {change.key_id for change in changes if change.key_id is not None}
        tenants = {change.tenant_id for change in changes if change.key_id is None}
        return {key_id for key_id, (tenant_id, _) in self._ends.items() if key_id in keys or tenant_id in tenants}

    def under_way(self) -> list[tuple[int, int]]:
        """Tenant and key of everything under way."""
        return [(tenant_id, key_id) for key_id, (tenant_id, _) in self._ends.items()]

    def end(self, key_id: int, fault: ApiError) -> int:
        """End every request of the key; how many there were."""
        _, ends = self._ends.get(key_id, (0, set()))
        for end in list(ends):
            end(fault)
        return len(ends)
