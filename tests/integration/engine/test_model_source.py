"""Model sources: conversion of a package, a file or a directory to a model directory, and errors of invalid ones."""

from __future__ import annotations

import itertools
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from inference_worker.checkpoints.checkpoint import weight_files
from inference_worker.checkpoints.decoder_config import read_decoder_directory
from inference_worker.checkpoints.gguf_convert import to_bfloat16
from inference_worker.checkpoints.gguf_file import GGUFFile
from inference_worker.checkpoints.gguf_header import GGUFError
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.checkpoints.model_source import embedded_source, ensure_model
from inference_worker.checkpoints.safetensors_header import read_header
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.settings import ModelSpec
from inference_worker.engine.architectures.layers import Linear
from inference_worker.engine.architectures.rope import Rope
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.loading.loader import Weights
from tests.support.gateway.bundles import load_models

ROOT = Path(__file__).resolve().parents[3]
EMBEDDED = ModelSpec("smollm2-135m", "embedded", "auto")


@pytest.fixture
def copy(model_dir: Path, tmp_path: Path) -> Path:
    """Copy the model's directory, with a link to its weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in model_dir.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        else:
            shutil.copy(path, folder)
    return folder


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_embedded_models_properties(model_dir: Path) -> None:
    config = read_decoder_directory(model_dir)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (64, 1536, 49_152)
    assert (config.max_model_len, config.rms_norm_eps, config.rope.theta) == (8192, 1e-5, 100_000.0)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize(("max_model_len", "expected"), [(None, 8192), (100, 100), (1 << 20, 8192)])
def test_the_gateways_context_length_is_the_engines(model_dir: Path, max_model_len: int | None, expected: int) -> None:
    served = load_models([ModelSpec("m", str(model_dir), "auto", max_model_len)])
    assert served["m"].context_length == expected


def test_a_conversion_is_logged_and_done_once(tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    folder = ensure_model(EMBEDDED, tmp_path, lambda done, total: progress.append((done, total)))
    assert folder.parent == tmp_path / "models"
    assert (
        progress[-1][0]
        == progress[-1][1]
        == sum(t[0] - s[0] for s, t in zip([(0, 0), *progress], progress, strict=False))
    )
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert ensure_model(EMBEDDED, tmp_path, lambda *_: pytest.fail("converted again")) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert ensure_model(ModelSpec("x", str(folder), "auto"), tmp_path) == folder


CONVERT = """
import sys
from pathlib import Path
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.settings import ModelSpec

made = []
folder = ensure_model(ModelSpec("smollm2-135m", "embedded", "auto"), Path(sys.argv[1]), lambda *step: made.append(step))
print(folder, bool(made))
"""


def test_of_two_processes_one_converts(tmp_path: Path) -> None:
    stale = tmp_path / "models"
    stale.mkdir()
    command = [sys.executable, "-c", CONVERT, tmp_path]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
    first, second = (process.communicate()[0].split() for process in processes)
    assert first[0] == second[0]
    assert {first[1], second[1]} == {"True", "False"}
    assert not list(stale.glob(".*.partial"))


def test_leftovers_of_a_killed_conversion_are_removed(tmp_path: Path, model_dir: Path) -> None:
    left = tmp_path / "models" / f".{model_dir.name}.dead.partial"
    left.mkdir(parents=True)
    ensure_model(EMBEDDED, tmp_path)
    assert not left.exists()


def test_a_failed_conversion_leaves_no_files(tmp_path: Path) -> None:
    def fail(_: int, __: int) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ensure_model(EMBEDDED, tmp_path, fail)
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]


@pytest.mark.parametrize("source", ["/nowhere", "/nowhere.gguf"])
def test_an_error_names_a_missing_source(source: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="/nowhere"):
        ensure_model(ModelSpec("x", source, "auto"), tmp_path)


def test_pickled_weights_are_not_read(copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match="safetensors"):
        ensure_model(ModelSpec("x", str(copy), "auto"), tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "model.bin", "missing.safetensors"])
def test_an_index_cannot_point_outside(name: str, copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError):
        weight_files(copy)


def test_sharded_weights_are_found_by_their_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with Weights(tmp_path, torch.float32, torch.device("cpu")) as weights:
        assert weights.take("a", (2,)).tolist() == [1, 1]
        assert weights.take("b", (3,)).tolist() == [0, 0, 0]
        with pytest.raises(ModelError, match="shape"):
            weights.take("b", (2,))
        with pytest.raises(ModelError, match="no tensor c"):
            weights.take("c", (2,))


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 100, struct.pack("<Q", 1 << 60), struct.pack("<Q", 8) + b"{}      "]
)
def test_an_error_names_damaged_safetensors(content: bytes, copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").write_bytes(content)
    try:
        ensure_model(ModelSpec("x", str(copy), "auto"), tmp_path)
    except ModelError as exc:
        assert "safetensors" in str(exc)
    else:
        assert content.endswith(b"{}      ")  # a complete file without tensors


def header_of(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def tensor_of(begin: int, end: int, shape: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<Q", 1 << 25) + bytes(1 << 25), "exceeds the limit"),
        (header_of(a=tensor_of(0, 8, [2]), b=tensor_of(4, 12, [2])) + bytes(12), "overlaps"),
        (header_of(a=tensor_of(0, 8, [2]), b=tensor_of(16, 24, [2])) + bytes(24), "leaves a gap"),
        (header_of(a=tensor_of(0, 8, [2])) + bytes(7), "is the download complete"),
        (header_of(a=tensor_of(0, 8, [2])) + bytes(9), "after the last tensor"),
        (header_of(a=tensor_of(0, 8, [3])) + bytes(8), "do not fit its shape"),
        (header_of(a=tensor_of(8, 0, [2])) + bytes(8), "do not fit its shape"),
        (header_of(a=tensor_of(-8, 0, [2])) + bytes(8), "invalid data_offsets"),
        (header_of(a=tensor_of(0, 8, [1 << 60, 1 << 60])) + bytes(8), "invalid shape"),
        (header_of(a=tensor_of(0, 8, [2], "F12")) + bytes(8), "unknown dtype"),
        (header_of(a=tensor_of(0, 8, [2], ["F32"])) + bytes(8), "unknown dtype"),
        (header_of(a=tensor_of(0, 8, True)) + bytes(8), "invalid shape"),
        (header_of(a=[]), "must have dtype"),
        (struct.pack("<Q", 14) + b'{"a":{},"a":0}', "occurs twice"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "safetensors"),
        (struct.pack("<Q", 4) + b"\xff" * 4, "safetensors"),
    ],
    ids=itertools.count(),  # a content of 32 MiB is no name of a test
)
def test_an_invalid_safetensors_header_is_rejected(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_header(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_safetensors_file_is_rejected_or_read(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.int8)}, path)
    content = bytearray(path.read_bytes())
    del content[data.draw(st.integers(0, len(content))) :]
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4)):
        if place < len(content):
            content[place] = value
    path.write_bytes(content)
    try:
        entries = read_header(path)
    except ModelError:
        return
    with safe_open(str(path), framework="pt") as file:  # what our reader accepts, the library reads
        assert {name: tuple(file.get_tensor(name).shape) for name in file.keys()} == {  # noqa: SIM118
            name: entry.shape for name, entry in entries.items()
        }


def test_two_files_with_one_tensor_are_rejected(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match="tensor 'a' is in another file, too"):
        Weights(tmp_path, torch.float32, torch.device("cpu"))


def test_the_progress_reaches_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    steps: list[tuple[int, int]] = []
    progress = lambda read, total: steps.append((read, total))  # noqa: E731
    with Weights(tmp_path, torch.float32, torch.device("cpu"), progress) as weights:
        for name, shape in (("a", (2,)), ("b", (3,)), ("a", (2,))):
            weights.take(name, shape)
    assert steps == [(8, 14), (14, 14)]


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "576"},
        {"hidden_size": -1},
        {"num_hidden_layers": 10**9},
        {"num_key_value_heads": 4},
        {"head_dim": 63},
        {"hidden_act": "gelu"},
        {"architectures": []},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        {"rope_scaling": 5},
        {"rms_norm_eps": 0},
        {"tie_word_embeddings": 1},
        {"torch_dtype": "float8"},
        {"quantization_config": {}},
    ],
    ids=str,
)
def test_an_error_names_an_impossible_configuration(changes: dict[str, object], copy: Path) -> None:
    edit(copy, **changes)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_decoder_directory(copy)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"layer_types": ["sliding_attention"] * 30},
        {"attn_logit_softcapping": 50.0},
        {"residual_multiplier": 0.2},
        {"num_local_experts": 8},
        {"clip_qkv": 8.0},
    ],
    ids=str,
)
def test_a_key_that_changes_results_and_is_not_supported_is_named(changes: dict[str, object], copy: Path) -> None:
    edit(copy, **changes)
    key = next(iter(changes)).replace("rope_parameters", "partial_rotary_factor")
    with pytest.raises(ModelError, match=f"{key} is .* not supported for LlamaForCausalLM"):
        read_decoder_directory(copy)


def test_neutral_values_are_accepted(copy: Path) -> None:
    before = read_decoder_directory(copy)
    edit(copy, sliding_window=None, partial_rotary_factor=1.0, layer_types=["full_attention"] * 30, clip_qkv=None)
    assert read_decoder_directory(copy) == before


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"a": NaN'])
def test_an_error_names_a_damaged_configuration(content: str, copy: Path) -> None:
    (copy / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_decoder_directory(copy)


def test_rope_is_read_from_old_and_new_files(copy: Path) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    edit(copy, rope_theta=500_000.0, rope_scaling=llama3)
    old = read_decoder_directory(copy).rope
    edit(copy, rope_theta=None, rope_scaling=None, rope_parameters={**llama3, "rope_theta": 500_000.0})
    assert read_decoder_directory(copy).rope == old


def test_llama3_rope_equals_transformers(copy: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    edit(copy, rope_scaling={**scaling, "original_max_position_embeddings": 1024})
    config = read_decoder_directory(copy)
    positions = torch.tensor([0, 1, 17, 5000])
    rope = Rope(config.rope, config.head_dim, 8192, 1, 1, torch.float32, torch.device("cpu"))
    queries = torch.randn(4, 2, config.head_dim)
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(copy))
    want_cos, want_sin = theirs(torch.zeros(1), positions[None])
    want, _ = apply_rotary_pos_emb(queries[None, :, :1].transpose(1, 2), queries[None, :, :1], want_cos, want_sin)
    got = rope.at(positions).apply(queries)
    torch.testing.assert_close(got[:, 0], want[0, 0], atol=1e-4, rtol=0)
    assert torch.equal(got[:, 1], queries[:, 1])  # values


@settings(max_examples=300, deadline=None)
@given(cut=st.integers(0, 4000), flips=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=4))
def test_a_damaged_gguf_file_is_rejected_cleanly(
    cut: int, flips: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with embedded_source("embedded").open("rb") as file:
        content = bytearray(file.read(4096)[: 4000 - cut])
    for place, value in flips:
        if place < len(content):
            content[place] = value
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError):
        GGUFFile(path)


@pytest.mark.parametrize(
    "header",
    [
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
        b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62),
        b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 4, 1 << 40),
        b"GGUF" + struct.pack("<IQQQ1sII4Q", 3, 1, 0, 1, b"a", 4, 0, *[1 << 31] * 3, 0),
    ],
    ids=["tensors", "keys", "version", "string", "array", "shape"],
)
def test_impossible_gguf_headers_are_rejected(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(header + b"\0" * 64)
    with pytest.raises(ModelError):
        ensure_model(ModelSpec("x", str(path), "auto"), tmp_path)


def test_an_incomplete_download_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    with embedded_source("embedded").open("rb") as file:
        path.write_bytes(file.read(20 << 20))  # the header is complete
    with pytest.raises(ModelError, match="download complete"):
        ensure_model(ModelSpec("x", str(path), "auto"), tmp_path)


def test_rounding_to_bfloat16_equals_pytorchs() -> None:
    values = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    ours = torch.from_numpy(to_bfloat16(values).astype(np.int16)).view(torch.bfloat16).float()
    torch.testing.assert_close(ours, torch.from_numpy(values).bfloat16().float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_give_equal_results(dtype: torch.dtype) -> None:
    weight, bias, x, other = torch.randn(24, 16), torch.randn(24), torch.randn(5, 16), torch.randn(5, 24)
    weight, bias, x, other = (t.to(dtype) for t in (weight, bias, x, other))
    for b in (None, bias):
        packed, plain = Linear(weight, b, pack=True), Linear(weight, b, pack=False)
        torch.testing.assert_close(packed(x), plain(x))
        torch.testing.assert_close(packed.add(x, other), plain.add(x, other), rtol=0.02, atol=0.04)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 0},
        {"block_size": 0},
        {"kv_cache_memory": 0},
        {"kv_cache_memory": 1.0},
        {"max_num_batched_tokens": 8},
    ],
)
def test_impossible_engine_settings_are_rejected(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be (at least (1|max_num_seqs)|above 0 and below 1)"):
        EngineConfig(Path(), **settings)  # type: ignore[arg-type]


def test_the_load_of_weights_reports_its_progress(model_dir: Path) -> None:
    progress: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        progress.append((done, total))

    LLMEngine(EngineConfig(model_dir, device="cpu", threads=1, num_blocks=300, measure_peaks=False, progress=note))
    assert progress[-1][0] == progress[-1][1] > 10**6
    assert progress == sorted(progress)
