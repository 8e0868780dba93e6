"""The active requests of this gateway by API key, so that they can be ended when the key is revoked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from millrace.gateway.core.errors import ApiError
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.outbox.change_feed import ChangeEvent

EndRequest = Callable[[ApiError], None]


class ActiveRequests:
    """The callbacks that end active requests, by key."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, set[EndRequest]]] = {}  # key ID -> (tenant ID, callbacks of its requests)

    def add(self, key: ApiKeySnapshot, end: EndRequest) -> None:
        self._ends.setdefault(key.key_id, (key.tenant_id, set()))[1].add(end)

    def remove(self, key: ApiKeySnapshot, end: EndRequest) -> None:
        _, requests = self._ends.get(key.key_id, (0, set()))
        requests.discard(end)
        if not requests:
            self._ends.pop(key.key_id, None)

    def __bool__(self) -> bool:
        return bool(self._ends)

    @contextmanager
    def register(self, key: ApiKeySnapshot, end: EndRequest) -> Iterator[None]:
        self.add(key, end)
        try:
            yield
        finally:
            self.remove(key, end)

    def affected_keys(self, changes: Collection[ChangeEvent]) -> set[int]:
        """Return the IDs of the keys with active requests that the changes affect."""
        keys = {change.key_id for change in changes if change.key_id is not None}
        tenants = {change.tenant_id for change in changes if change.key_id is None}
        return {key_id for key_id, (tenant_id, _) in self._ends.items() if key_id in keys or tenant_id in tenants}

    def tenants_and_keys(self) -> list[tuple[int, int]]:
        """Return the (tenant ID, key ID) of every key with active requests."""
        return [(tenant_id, key_id) for key_id, (tenant_id, _) in self._ends.items()]

    def end(self, key_id: int, error: ApiError) -> int:
        """End every request of the key with this error, and return their number."""
        _, requests = self._ends.get(key_id, (0, set()))
        for end in list(requests):
            end(error)
        return len(requests)
