"""Hashes of previously cached blocks, to explain cache misses. Does not import torch."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


class PrefixHistory:
    """The last published hashes, each with the tokens of the block that followed it last. The oldest are removed first.

    Args:
        size: maximum number of blocks. One takes about 250 bytes and its tokens.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._next: OrderedDict[bytes, array[int]] = OrderedDict()  # hash -> tokens of the next block

    def add(self, parent: bytes | None, block_hash: bytes, tokens: Sequence[int]) -> None:
        """Record a block that was published after the block `parent`; None for a prompt's first block."""
        self._remember(self._seen, block_hash, None)
        if parent is not None:
            self._remember(self._next, parent, array("I", tokens))

    def was_cached(self, block_hash: bytes) -> bool:
        return block_hash in self._seen

    def leaves_at(self, parent: bytes, tokens: Sequence[int]) -> int | None:
        """Return how many of `tokens` equal the tokens that followed `parent` last; None if none did."""
        known = self._next.get(parent)
        if known is None:
            return None
        return next((i for i, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b), len(tokens))

    def clear(self) -> None:
        self._seen.clear()
        self._next.clear()

    def _remember(self, where: OrderedDict[bytes, _T], key: bytes, value: _T) -> None:
        where[key] = value
        where.move_to_end(key)
        if len(where) > self.size:
            where.popitem(last=False)
