"""Rotary embedding fused with the cache write: results in Triton's interpreter, and invalid arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import reference
from kernels.triton import rope_write_cache
from tests.support.kernels.compiler import recorded_launches
from tests.support.kernels.interpreter import Interpreter


def arguments(num_heads: int, num_kv_heads: int, head_dim: int, slots: list[int]) -> dict[str, Any]:
    """Return arguments of `rope_write_cache` for len(slots) tokens, with queries, keys and values in one projection."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(len(slots), num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    query, key, value = fused.split((num_heads, num_kv_heads, num_kv_heads), 1)
    frequencies = 1 / 10_000 ** (torch.arange(0, head_dim, 2) / head_dim)
    cos, sin = reference.rope_tables(frequencies, 64)
    return {
        "query": query, "key": key, "value": value, "cos": cos, "sin": sin,
        "positions": torch.randint(64, (len(slots),), generator=generator),
        "key_cache": torch.zeros(4, 16, num_kv_heads, head_dim),
        "value_cache": torch.zeros(4, 16, num_kv_heads, head_dim),
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
    }  # fmt: skip


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (4, 128), (8, 64)])
def test_queries_and_keys_are_rotated_and_written(interpreter: Interpreter, group: int, head_dim: int) -> None:
    given = arguments(2 * group, 2, head_dim, slots=[0, 15, 16, 63, 40])
    cos, sin = given["cos"][given["positions"]], given["sin"][given["positions"]]
    rotated = reference.apply_rope(given["query"], cos, sin)
    key, value = given["key"].clone(), given["value"].clone()
    key_cache, value_cache = torch.zeros(4, 16, 2, head_dim), torch.zeros(4, 16, 2, head_dim)
    reference.write_cache(reference.apply_rope(key, cos, sin), value, key_cache, value_cache, given["slot_mapping"])
    interpreter.rope_write_cache(**given)
    torch.testing.assert_close(given["query"], rotated)
    torch.testing.assert_close(given["key_cache"], key_cache)
    torch.testing.assert_close(given["value_cache"], value_cache)
    assert torch.equal(given["key"], key)
    assert torch.equal(given["value"], value)


def test_padding_writes_nothing(interpreter: Interpreter) -> None:
    given = arguments(2, 1, 64, slots=[-1, 3, -1])
    interpreter.rope_write_cache(**given)
    for cache in (given["key_cache"], given["value_cache"]):
        assert cache.flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist() == [3]


def test_int32_indices_and_one_layer_of_a_larger_cache(interpreter: Interpreter) -> None:
    given = arguments(2, 1, 64, slots=[20, 1])
    given["positions"] = given["positions"].int()
    given["slot_mapping"] = given["slot_mapping"].int()
    layers = torch.zeros(3, 2, 4, 16, 1, 64)
    wanted = {name: value.clone() for name, value in given.items()}
    interpreter.rope_write_cache(**wanted)
    interpreter.rope_write_cache(**(given | {"key_cache": layers[1, 0], "value_cache": layers[1, 1]}))
    assert torch.equal(layers[1, 0], wanted["key_cache"])
    assert torch.equal(layers[1, 1], wanted["value_cache"])
    assert not layers[::2].any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key": torch.zeros(2, 2, 64)}, ValueError, "key must have the cache's heads"),
        ({"value": torch.zeros(2, 1, 64, dtype=torch.bfloat16)}, TypeError, "value must be float32"),
        ({"cos": torch.zeros(64, 64)}, ValueError, "cos must be"),
        ({"sin": torch.zeros(64, 32, dtype=torch.bfloat16)}, TypeError, "sin must be float32"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, ValueError, "positions must be"),
        ({"slot_mapping": torch.zeros(2)}, TypeError, "slot_mapping must be int32 or int64"),
    ],
)
def test_invalid_arguments_are_rejected(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with recorded_launches() as launches, pytest.raises(error, match=message):
        rope_write_cache(**(arguments(2, 1, 64, slots=[0, 1]) | change))
    assert not launches


def test_no_tokens_launch_nothing() -> None:
    with recorded_launches() as launches:
        rope_write_cache(**arguments(2, 1, 64, slots=[]))
    assert not launches
