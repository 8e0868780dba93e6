"""A sorted collection for keys that only grow. Does not import torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class GrowingOrder(Generic[T]):
    """Items in increasing order of a key, ties in the order of their numbers.

    A key may grow while its item is in the collection. The item moves when a reader reaches it, so growth itself costs
    nothing. A key must not shrink: remove the item and add it again instead.

    Args:
        key: returns an item's current key.
    """

    def __init__(self, key: Callable[[T], float]) -> None:
        self._key = key
        self._entries: list[tuple[float, int, T]] = []  # keys as they were when the item was added or last read
        self._places: dict[T, tuple[float, int]] = {}  # key and number of each item's entry

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (item for _, _, item in self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def add(self, item: T, number: int) -> None:
        """Add an item that is not in the collection. No two items may have the same number."""
        self._insert(item, number, self._key(item))

    def discard(self, item: T) -> None:
        """Remove the item if the collection contains it."""
        place = self._places.pop(item, None)
        if place is not None:
            del self._entries[bisect_left(self._entries, place)]

    def at(self, index: int) -> T | None:
        """Return the item at this index, None after the last.

        The indexes before it must have been read first, in order: reading moves items whose keys have grown.
        """
        entries = self._entries
        while index < len(entries):
            known, number, item = entries[index]
            key = self._key(item)
            if key == known:
                return item
            del entries[index]
            self._insert(item, number, key)
        return None

    def list_first(self, count: int) -> list[T]:
        """Return the first items, at most `count`."""
        items: list[T] = []
        while len(items) < count and (item := self.at(len(items))) is not None:
            items.append(item)
        return items

    def _insert(self, item: T, number: int, key: float) -> None:
        self._places[item] = (key, number)
        insort(self._entries, (key, number, item))
