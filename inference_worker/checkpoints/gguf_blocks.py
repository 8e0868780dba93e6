"""The types of GGUF blocks that the engine keeps quantized. Does not import torch."""

from __future__ import annotations

from typing import NamedTuple


class BlockType(NamedTuple):
    """The size of a block, and the bytes of a number after it is loaded, with its part of scales and zero points."""

    numbers: int
    num_bytes: int
    loaded_bytes: float


_INT8, _INT4 = 1 + 4 / 32, 0.5 + 8 / 32

# By the name in lower case, which is also the suffix of a converted tensor.
KEPT_BLOCKS = {
    "q8_0": BlockType(32, 34, _INT8),
    "q5_0": BlockType(32, 22, _INT8),
    "q4_0": BlockType(32, 18, _INT4),
    "q4_1": BlockType(32, 20, _INT4),
    "q4_k": BlockType(256, 144, _INT4),
}
