"""KV offload: blocks that were evicted from the device, in CPU memory until they are reused or evicted here too.

This module does the accounting and does not import torch. The model runner copies the contents, in the order of the
step's block operations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class KVOffloadCache:
    """Slots of CPU memory, each for one block, found by the block's hash. The least recently stored block is evicted
    first.

    Args:
        num_slots: number of blocks that fit; 0: no offload.
        is_pinned: returns whether the block of a hash is pinned. A pinned block is replaced only by another pinned one.
    """

    def __init__(self, num_slots: int, is_pinned: Callable[[bytes], bool] = lambda _: False) -> None:
        self.num_slots = num_slots
        self._is_pinned = is_pinned
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._being_read: list[int] = []  # slots whose blocks the current step restores

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def put(self, block_hash: bytes) -> int | None:
        """Return a slot for the block's content, if necessary by evicting another block. None if the block is present
        or no block may be evicted."""
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return None
        if not self._free and not self._displace(self._is_pinned(block_hash)):
            return None
        slot = self._free.pop()
        self._slots[block_hash] = slot
        return slot

    def take(self, block_hash: bytes) -> int:
        """Remove a block that is restored to the device, and return its slot. The slot is not reused until `end_step`.

        Raises:
            KeyError: the block is not present.
        """
        slot = self._slots.pop(block_hash)
        self._being_read.append(slot)
        return slot

    def end_step(self) -> None:
        """Release the slots of a step's restores, so that later steps may overwrite them."""
        self._free += self._being_read
        self._being_read.clear()

    def drop(self, block_hash: bytes) -> None:
        """Remove a block if it is present."""
        slot = self._slots.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)

    def drop_slots(self, slots: set[int]) -> None:
        """Remove the blocks in these slots."""
        for block_hash in [h for h, slot in self._slots.items() if slot in slots]:
            self.drop(block_hash)

    def clear(self) -> None:
        for block_hash in list(self._slots):
            self.drop(block_hash)

    def check_integrity(self) -> None:
        """Check that each slot is in exactly one list.

        Raises:
            RuntimeError: a slot is missing or duplicated.
        """
        if sorted([*self._free, *self._slots.values(), *self._being_read]) != list(range(self.num_slots)):
            raise RuntimeError("KV offload integrity: a slot is in two lists, or in none")

    def _displace(self, for_pinned: bool) -> bool:
        victim = next((h for h in self._slots if not self._is_pinned(h)), None)
        if victim is None and for_pinned:
            victim = next(iter(self._slots), None)
        if victim is None:
            return False
        self.drop(victim)
        return True
