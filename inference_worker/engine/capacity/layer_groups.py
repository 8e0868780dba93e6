"""Groups of layers with the same window. Each KV cache block belongs to one group. Does not import torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

MAX_GROUPS = 8  # each group costs an allocation per block and a plan per step
_MAX_PADDING = 0.25  # share of the layers; with more unused memory, blocks behind a window are not freed


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of a model's layers. All groups take their blocks from one pool, so each has the same size.

    windows: of each group, in tokens; 0: all tokens. Groups without a window come first.
    groups: the group of each layer.
    places: the place of each layer in its group's blocks.
    layers_per_block: places in a block. The last group of a window may leave some unused.
    """

    windows: tuple[int, ...]
    groups: tuple[int, ...]
    places: tuple[int, ...]
    layers_per_block: int


def group_layers(windows: Sequence[int], num_layers: int, max_model_len: int) -> LayerGroups:
    """Return the groups of layers.

    Args:
        windows: of each layer in tokens, 0: all tokens; empty: no layer has a window.
        max_model_len: tokens of the longest sequence. A window that is not shorter has no effect.
    """
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows or (0,) * num_layers):
        kinds.setdefault(window if window < max_model_len else 0, []).append(layer)
    single = LayerGroups((0,), (0,) * num_layers, tuple(range(num_layers)), num_layers)
    if kinds.keys() == {0}:
        return single
    size = _block_layers([len(kinds[window]) for window in sorted(kinds)], has_full=0 in kinds)
    if size is None:
        return single
    group_windows: list[int] = []
    groups, places = [0] * num_layers, [0] * num_layers
    for window, layers in sorted(kinds.items()):
        for index, layer in enumerate(layers):
            groups[layer], places[layer] = len(group_windows) + index // size, index % size
        group_windows += [window] * -(-len(layers) // size)
    return LayerGroups(tuple(group_windows), tuple(groups), tuple(places), size)


def _block_layers(counts: Sequence[int], *, has_full: bool) -> int | None:
    """Return the layers per block for groups of `counts` layers; None if too many groups or too much padding result.

    Unused memory in blocks of layers without a window is the most expensive, because their number grows with the
    sequence.
    """
    best = None
    for size in range(1, max(counts) + 1):
        groups = [-(-count // size) for count in counts]
        padding = [number * size - count for number, count in zip(groups, counts, strict=True)]
        if sum(groups) <= MAX_GROUPS and sum(padding) <= _MAX_PADDING * sum(counts):
            cost = (padding[0] if has_full else 0, sum(padding), sum(groups), size)
            best = cost if best is None else min(best, cost)
    return None if best is None else best[-1]


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """The number of blocks that sequences need.

    block_size: tokens of a block.
    windows: of each group; 0: all tokens.
    tokens_in_flight: maximum new tokens of a sequence in steps that have not ended.
    """

    block_size: int
    windows: tuple[int, ...] = (0,)
    tokens_in_flight: int = 0

    def blocks_per_group(self, num_tokens: int) -> int:
        """Return the blocks of `num_tokens` tokens in one group, with those behind a window."""
        return -(-num_tokens // self.block_size)

    def max_window_blocks(self, window: int) -> int:
        """Return the maximum number of blocks that a sequence has at one time in a group with this window."""
        # The span of these tokens may start at any token of a block.
        return (window + self.tokens_in_flight + self.block_size - 2) // self.block_size + 1

    def blocks_for(self, num_tokens: int) -> int:
        """Return the maximum number of blocks that a sequence of `num_tokens` tokens has at one time in all groups."""
        count = self.blocks_per_group(num_tokens)
        return sum(min(count, self.max_window_blocks(window)) if window else count for window in self.windows)

    def max_tokens(self, num_blocks: int, max_model_len: int) -> int:
        """Return the length of the longest sequence that fits into `num_blocks`.

        If each length fits, it is at least `max_model_len`.
        """
        limit = max(num_blocks, self.blocks_per_group(max_model_len))
        count = bisect_right(range(1, limit + 1), num_blocks, key=lambda n: self.blocks_for(n * self.block_size))
        return count * self.block_size
