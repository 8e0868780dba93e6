"""Pins: cached blocks that a tenant has paid to store for five minutes or an hour. Does not import torch.

A pin refers to a hash, not to a block. It stays when the block has moved to CPU memory and when the block was evicted,
because an evicted block is still billed as a cache read.
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
    index: int  # place of the block in its prompt


class Pins:
    """All active pins of one cache.

    Args:
        max_pins: limit for all tenants together.
        max_tenant_pins: limit for one tenant.
    """

    def __init__(self, max_pins: int, max_tenant_pins: int) -> None:
        self.max_pins = max_pins
        self.max_tenant_pins = max_tenant_pins
        self._pins: dict[bytes, Pin] = {}
        self._num_pins: Counter[str] = Counter()
        self._expiries: list[
            tuple[float, bytes]
        ] = []  # a heap; the entry of a refreshed pin may be too early, never too late

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._pins

    def __getitem__(self, block_hash: bytes) -> Pin:
        return self._pins[block_hash]

    def add(self, block_hash: bytes, tenant: str, seconds: int, index: int, now: float) -> bool:
        """Pin a hash for `seconds` from now, or keep a later expiry. Return False if a limit is reached."""
        if block_hash in self._pins:
            pin = self._pins[block_hash]
            pin.seconds = max(pin.seconds, seconds)
            pin.expires = max(pin.expires, now + pin.seconds)
            return True
        if len(self._pins) >= self.max_pins or self._num_pins[tenant] >= self.max_tenant_pins:
            return False
        self._pins[block_hash] = Pin(tenant, seconds, now + seconds, index)
        self._num_pins[tenant] += 1
        heappush(self._expiries, (now + seconds, block_hash))
        return True

    def refresh(self, block_hash: bytes, now: float) -> None:
        """Restart a pin's duration after a hit, if the pin exists."""
        pin = self._pins.get(block_hash)
        if pin is not None:
            pin.expires = max(pin.expires, now + pin.seconds)

    def drop(self, block_hash: bytes) -> None:
        """Remove a pin if it exists."""
        pin = self._pins.pop(block_hash, None)
        if pin is not None:
            self._num_pins[pin.tenant] -= 1
            if not self._num_pins[pin.tenant]:
                del self._num_pins[pin.tenant]

    def expire(self, now: float) -> list[bytes]:
        """Remove expired pins and return their hashes."""
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
        self._num_pins.clear()
        self._expiries.clear()

    def check_integrity(self) -> None:
        """Check counts and limits.

        Raises:
            RuntimeError: a count is wrong, a limit is exceeded, or a pin would never expire.
        """
        counted = Counter(pin.tenant for pin in self._pins.values())
        if counted != self._num_pins or len(self._pins) > self.max_pins:
            raise RuntimeError("pin integrity: a tenant's pin count is wrong, or there are too many pins")
        if any(count > self.max_tenant_pins for count in counted.values()):
            raise RuntimeError("pin integrity: a tenant has more pins than its limit")
        if not set(self._pins) <= {block_hash for _, block_hash in self._expiries}:
            raise RuntimeError("pin integrity: a pin never expires")
