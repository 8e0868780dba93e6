"""GGUF files that cannot be converted, inspected and loaded."""

from __future__ import annotations

import os
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from inference_worker.checkpoints.gguf_file import GGUFFile
from inference_worker.checkpoints.gguf_header import GGUFError, header_of
from inference_worker.checkpoints.inspection import inspect_checkpoint
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.settings import ModelSpec


def write(path: Path, architecture: str, name: str, shape: tuple[int, ...], **changes: int) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {"block_count": 1, "context_length": 64, "embedding_length": 8, "attention.head_count": 2}
    experts = {"expert_count": 1, "expert_used_count": 1, "expert_feed_forward_length": 8}
    for key, value in (values | (experts if "moe" in architecture else {})).items():
        writer.add_uint32(f"{architecture}.{key}", changes.pop(key, value))
    for key, value in changes.items():
        writer.add_uint16(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    writer.add_token_types([1, 1])
    writer.add_token_merges([])
    writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "name", "shape", "changes", "message"),
    [
        ("llama", "weight", (2, 8), {}, "tensor weight .* is not part of"),
        ("llama", "", (2, 8), {}, "is not part of"),
        ("llama", f"blk.{'1' * 5000}.attn_q.weight", (8, 8), {}, "is not part of"),
        ("qwen3moe", "blk.0.ffn_up_exps.weight", (1 << 13, 1, 1), {}, "is not part of"),
        ("granite", "token_embd.weight", (2, 8), {"embedding_length": 0}, "embedding_length"),
    ],
)
def test_a_hostile_file_is_reported(
    architecture: str, name: str, shape: tuple[int, ...], changes: dict[str, int], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.gguf"
    write(path, architecture, name, shape, **changes)
    check_problem(path, message)


def check_problem(path: Path, message: str) -> None:
    problem = inspect_checkpoint(path).problems[0]
    assert re.search(message, problem.message)
    assert len(problem.message) < 1000
    with pytest.raises(ModelError, match=message):
        ensure_model(ModelSpec("x", str(path), "auto"), path.parent)


def test_a_part_of_a_split_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x-00001-of-00002.gguf"
    write(path, "llama", "token_embd.weight", (2, 8), **{"split.no": 0, "split.count": 2})
    check_problem(path, "is one of 2 parts, which are not supported: merge")
    assert [problem.code for problem in inspect_checkpoint(path).problems] == ["unsupported_config"]


def test_the_memory_of_a_header_is_limited(tmp_path: Path) -> None:
    path, items = tmp_path / "x.gguf", 1 << 20
    with path.open("wb") as file:  # the arrays are holes in the file
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 30))
        for index in range(30):
            file.write(struct.pack("<Q2sIIQ", 2, b"%02d" % index, 9, 2, items))  # an array of 16-bit integers
            file.truncate(file.seek(2 * items, os.SEEK_CUR))
    tracemalloc.start()
    try:
        for read in (header_of, GGUFFile):
            with pytest.raises(GGUFError, match="items in arrays exceed the limit"):
                read(path)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    with path.open("r+b") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 1 << 16, 0))
        for _ in range(70):  # tensors with names of 1 MiB
            file.write(struct.pack("<Q", 1 << 20))
            file.truncate(file.seek(1 << 20, os.SEEK_CUR))
            file.write(struct.pack("<IQIQ", 1, 1, 0, 0))
    with pytest.raises(GGUFError, match="the header exceeds the limit of 64 MiB"):
        header_of(path)
