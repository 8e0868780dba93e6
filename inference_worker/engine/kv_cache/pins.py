"""Pins: cached blocks that a tenant has paid to keep for five minutes or an hour. Free of torch.

A pin is a promise about a hash, not about a block: it lives on when the block has moved to host memory, and when it was
lost, since what the platform lost is still billed as read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(slots=True)
class Pin:
    tenant: str
    seconds: int
    expires: float  # the engine's clock
    index: int  # the block's place in its prompt


class Pins:
    """All live pins of one cache.

    Args:
        most: pins of all tenants together.
        most_per_tenant: pins of one tenant.
    """

    def __init__(self, most: int, most_per_tenant: int) -> None:
        self.most = most
        self.most_per_tenant = most_per_tenant
        self._pins: dict[bytes, Pin] = {}
        self._held: Counter[str] = Counter()
        self._expiries: list[tuple[float, bytes]] = []  # a heap; a refreshed pin's entry is too early, never too late

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._pins

    def __getitem__(self, block_hash: bytes) -> Pin:
        return self._pins[block_hash]

    def held_by(self, tenant: str) -> int:
        return self._held[tenant]

    def add(self, block_hash: bytes, tenant: str, seconds: int, index: int, now: float) -> bool:
        """Pin for `seconds` from now, or for longer if it is so already. False: a cap is reached."""
        if block_hash in self._pins:
            pin = self._pins[block_hash]
            pin.seconds = max(pin.seconds, seconds)
            pin.expires = max(pin.expires, now + pin.seconds)
            return True
        if len(self._pins) >= self.most or self._held[tenant] >= self.most_per_tenant:
            return False
        self._pins[block_hash] = Pin(tenant, seconds, now + seconds, index)
        self._held[tenant] += 1
        heappush(self._expiries, (now + seconds, block_hash))
        return True

    def refresh(self, block_hash: bytes, now: float) -> None:
        """Restart the pin's time after a hit, if there is a pin."""
        pin = self._pins.get(block_hash)
        if pin is not None:
            pin.expires = max(pin.expires, now + pin.seconds)

    def drop(self, block_hash: bytes) -> None:
        """End a pin, if there is one."""
        pin = self._pins.pop(block_hash, None)
        if pin is not None:
            self._held[pin.tenant] -= 1
            if not self._held[pin.tenant]:
                del self._held[pin.tenant]

    def expire(self, now: float) -> list[bytes]:
        """End the pins whose time is up; their hashes."""
        ended = []
        while self._expiries and self._expiries[0][0] <= now:
            _, block_hash = heappop(self._expiries)
            pin = self._pins.get(block_hash)
            if pin is None:
                continue
            if pin.expires > now:
                heappush(self._expiries, (pin.expires, block_hash))
            else:
                self.drop(block_hash)
                ended.append(block_hash)
        return ended

    def clear(self) -> None:
        self._pins.clear()
        self._held.clear()
        self._expiries.clear()

    def check_integrity(self) -> None:
        """Check counts and caps.

        Raises:
            RuntimeError: a count is wrong, a cap is passed, or a pin would never expire.
        """
        counted = Counter(pin.tenant for pin in self._pins.values())
        if counted != self._held or len(self._pins) > self.most:
            raise RuntimeError("pin integrity: a tenant's pins are miscounted, or there are too many")
        if any(count > self.most_per_tenant for count in counted.values()):
            raise RuntimeError("pin integrity: a tenant has more pins than its cap")
        if not set(self._pins) <= {block_hash for _, block_hash in self._expiries}:
            raise RuntimeError("pin integrity: a pin has no end")
