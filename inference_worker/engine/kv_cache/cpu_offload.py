"""The second tier: blocks given up on the device, kept in host memory until they are wanted or too old. Free of torch.

This file keeps the accounts; the copying is done by the runner, in the order of the step's block operations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class KVOffloadCache:
    """Slots of host memory, each for one block, found by the block's hash. The least recently kept goes first.

    Args:
        num_slots: blocks that fit; 0: there is no such tier.
        is_pinned: whether the block of a hash must be kept; such a one goes only for another of its kind.
    """

    def __init__(self, num_slots: int, is_pinned: Callable[[bytes], bool] = lambda _: False) -> None:
        self.num_slots = num_slots
        self._is_pinned = is_pinned
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._being_read: list[int] = []  # slots whose blocks the step at hand restores

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def put(self, block_hash: bytes) -> int | None:
        """Return a slot for the block's content, another's if need be; None if it is there already or must not
        displace."""
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return None
        if not self._free and not self._displace(self._is_pinned(block_hash)):
            return None
        slot = self._free.pop()
        self._slots[block_hash] = slot
        return slot

    def take(self, block_hash: bytes) -> int:
        """Return the block moves back to the device: its slot, which stays untouched until `end_step`.

        Raises:
            KeyError: the block is not here.
        """
        slot = self._slots.pop(block_hash)
        self._being_read.append(slot)
        return slot

    def end_step(self) -> None:
        """Release the slots of a step's restores, which later steps may overwrite."""
        self._free += self._being_read
        self._being_read.clear()

    def drop(self, block_hash: bytes) -> None:
        """Forget a block, if it is here."""
        slot = self._slots.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)

    def drop_slots(self, slots: set[int]) -> None:
        """Forget the blocks in these slots."""
        for block_hash in [h for h, slot in self._slots.items() if slot in slots]:
            self.drop(block_hash)

    def clear(self) -> None:
        for block_hash in list(self._slots):
            self.drop(block_hash)

    def check_integrity(self) -> None:
        """Check that each slot is in one place.

        Raises:
            RuntimeError: one is not.
        """
        if sorted([*self._free, *self._slots.values(), *self._being_read]) != list(range(self.num_slots)):
            raise RuntimeError("host tier integrity: a slot is in two places, or in none")

    def _displace(self, for_pinned: bool) -> bool:
        victim = next((h for h in self._slots if not self._is_pinned(h)), None)
        if victim is None and for_pinned:
            victim = next(iter(self._slots), None)
        if victim is None:
            return False
        self.drop(victim)
        return True
