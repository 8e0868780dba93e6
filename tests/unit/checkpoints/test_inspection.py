"""Inspection of checkpoints without loading them, and their fit to a machine."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from inference_worker.checkpoints.encoder_config import ENCODER_ARCHITECTURES, supported_architectures
from inference_worker.checkpoints.inspection import inspect_checkpoint
from inference_worker.checkpoints.model_config import ModelConfig, ModelError
from inference_worker.contract.engine_config import DEFAULT_KV_BYTES, PROFILES, QuantizationName
from inference_worker.engine import architectures
from inference_worker.engine.capacity.fit import ComputeDevice, estimate_fit
from inference_worker.engine.capacity.roofline import Peaks
from inference_worker.engine.quantization.quantize import quantize, quantize_head
from tests.support.engine.families import CASES, FamilyModel
from tests.support.engine.gguf_files import write_gguf
from tests.support.engine.tiny_models import make_cross_encoder
from tests.support.engine.tiny_qwen3 import CONTEXT, HEAD_DIM, KV_HEADS, LAYERS, TEMPLATE, VOCAB, write_qwen3

HQQ = {"quant_method": "hqq"}
DEVICE = ComputeDevice("cpu", "test", 64 << 30, "bfloat16", Peaks(flops=1e12, bandwidth=1e10))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_qwen3(tmp_path / "qwen3", shards=2)


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_report_of_a_supported_checkpoint(checkpoint: Path) -> None:
    (checkpoint / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\nlicense: mit\n")
    (checkpoint / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.95}')
    report = inspect_checkpoint(checkpoint)
    assert report.problems == ()
    values = report.as_json()
    weights = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert weights - 8192 < values.pop("stored_bytes") < weights
    assert values == {
        "path": str(checkpoint),
        "format": "safetensors",
        "supported": True,
        "problems": [],
        "architecture": "Qwen3ForCausalLM",
        "task": "generate",
        "dtype": "float32",
        "quantization": None,
        "num_files": 2,
        "max_model_len": CONTEXT,
        "tokenizer": "BPE (bytes)",
        "vocab_size": 263,
        "chat_template": True,
        "tool_parser": "qwen3",
        "reasoning_parser": "qwen3",
        "sampling_defaults": "temperature=0.6,top_p=0.95",
        "template_adaptations": [],
        "license": "apache-2.0",
    }
    assert report.weight_bytes(2) * 2 == report.weight_bytes(4) == report.stored_bytes


def test_the_report_of_a_cross_encoder(tmp_path: Path) -> None:
    make_cross_encoder(tmp_path / "model")
    values = inspect_checkpoint(tmp_path / "model").as_json()
    assert (values["task"], values["supported"], values["tool_parser"]) == ("rerank", True, None)
    assert values["tokenizer"] == "WordPiece"


def _remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def _write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(data)


def _truncate(directory: Path) -> None:
    path = directory / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def _pickle(directory: Path) -> None:
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    (directory / "pytest_model.bin").write_bytes(b"\x80\x04.")


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (_remove("config.json"), "missing_file"),
        (_write("config.json", b"{"), "damaged_file"),
        (_write("config.json", b"[" * 100_000), "damaged_file"),
        (_remove("tokenizer.json"), "unsupported_tokenizer"),
        (_write("tokenizer.json", b"{}"), "unsupported_tokenizer"),
        (_write("chat_template.jinja", b"{% for %}"), "unsupported_tokenizer"),
        (_remove("model-00001-of-00002.safetensors"), "missing_file"),
        (_write("model.safetensors.index.json", b'{"weight_map": {"x": "../x.safetensors"}}'), "missing_file"),
        (_write("model-00001-of-00002.safetensors", b""), "damaged_file"),
        (_write("model-00001-of-00002.safetensors", struct.pack("<Q", 1 << 60) + b"{}"), "damaged_file"),
        (_truncate, "damaged_file"),
        (_pickle, "pickled_weights"),
        (lambda directory: edit_config(directory, architectures=["Rwkv7ForCausalLM"]), "unsupported_architecture"),
        (lambda directory: edit_config(directory, architectures=None), "unsupported_config"),
        (lambda directory: edit_config(directory, clip_qkv=8.0), "unsupported_config"),
        (lambda directory: edit_config(directory, num_attention_heads=-1), "unsupported_config"),
        (
            lambda directory: edit_config(directory, quantization_config={"quant_method": "hqq"}),
            "unsupported_quantization",
        ),
    ],
)
def test_each_problem_has_a_code_and_no_memory(checkpoint: Path, damage: Callable[[Path], object], code: str) -> None:
    damage(checkpoint)
    report = inspect_checkpoint(checkpoint)
    assert code in [problem.code for problem in report.problems]
    assert not report.is_supported
    with pytest.raises(ValueError, match="not supported"):
        estimate_fit(report, DEVICE)


def test_packed_weights_count_as_they_are_stored(tmp_path: Path) -> None:
    directory = write_qwen3(tmp_path / "awq")
    edit_config(directory, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"})
    arrays = {"packed.qweight": np.zeros((64, 128), np.int32), "norm.weight": np.zeros(64, np.float32)}
    save_file(arrays, directory / "model.safetensors")
    report = inspect_checkpoint(directory)
    assert (report.problems, report.quantization, report.dtype) == ((), "awq", "i32")
    assert (report.weight_bytes(2), report.weight_bytes(4)) == (64 * 128 * 4 + 64 * 2, 64 * 128 * 4 + 64 * 4)
    rate = estimate_fit(report, DEVICE, context=16).decode_tokens_per_second
    assert rate is not None
    assert rate == pytest.approx(1e10 / report.weight_bytes(2), rel=0.2)


def test_a_path_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("")
    for name in ("missing", "x.txt"):
        with pytest.raises(ModelError, match="neither"):
            inspect_checkpoint(tmp_path / name)


def test_damaged_headers_are_reported(checkpoint: Path) -> None:
    numbers = random.Random(0)
    path = checkpoint / "model-00001-of-00002.safetensors"
    original = path.read_bytes()
    reported = 0
    for _ in range(200):
        data = bytearray(original)
        for _ in range(numbers.randrange(1, 8)):
            data[numbers.randrange(600)] = numbers.randrange(256)
        path.write_bytes(data)
        reported += not inspect_checkpoint(checkpoint).is_supported
    assert reported > 100


def test_damaged_gguf_headers_are_reported(tmp_path: Path) -> None:
    numbers = random.Random(0)
    path = tmp_path / "x.gguf"
    start = b"GGUF" + struct.pack("<IQQ", 3, 1, 2)
    for _ in range(200):
        path.write_bytes(start + numbers.randbytes(numbers.randrange(400)))
        assert not inspect_checkpoint(path).is_supported


def test_weights_are_not_read(tmp_path: Path) -> None:
    """A sparse file of 140 GB."""
    directory = write_qwen3(tmp_path / "large")
    shape = [1 << 16, (70_000_000_000 >> 16) & ~1]
    size = shape[0] * shape[1] * 2
    header = json.dumps({"large": {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + size)
    report = inspect_checkpoint(directory)
    assert report.stored_bytes == report.weight_bytes(2) == size
    assert path.stat().st_blocks * 512 < 1 << 20
    fit = estimate_fit(report, DEVICE)
    assert fit.problem is not None
    assert "weights need" in fit.problem


def test_every_architecture_of_the_engine_is_known() -> None:
    assert supported_architectures() == architectures.MODELS.keys() | ENCODER_ARCHITECTURES.keys()


def test_the_fit_is_computed_from_the_cache_and_the_roofline(checkpoint: Path) -> None:
    report = inspect_checkpoint(checkpoint)
    fit = estimate_fit(report, DEVICE, context=256)
    token_bytes = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
    assert (fit.problem, fit.kv_token_bytes, fit.kv_bytes) == (None, token_bytes, DEFAULT_KV_BYTES)
    assert fit.kv_tokens == DEFAULT_KV_BYTES // token_bytes
    assert fit.streams == fit.kv_tokens // 256
    assert isinstance(report.config, ModelConfig)
    read = fit.weight_bytes + 128 * token_bytes + token_bytes
    assert fit.decode_tokens_per_second is not None
    assert fit.decode_tokens_per_second == pytest.approx(1e10 / read, rel=0.02)  # limited by the memory
    streams = PROFILES["balanced"].max_num_seqs
    read = fit.weight_bytes + streams * 129 * token_bytes
    assert fit.batch_tokens_per_second == pytest.approx(streams * 1e10 / read, rel=0.02)
    unmeasured = estimate_fit(report, replace(DEVICE, peaks=None), context=256)
    assert (unmeasured.streams, unmeasured.decode_tokens_per_second) == (fit.streams, None)


@pytest.mark.parametrize("quantization", ["int8", "int4", "int4-g64", "fp8"])
def test_the_fit_of_quantized_weights_is_what_the_engine_keeps(
    checkpoint: Path, quantization: QuantizationName
) -> None:
    report = inspect_checkpoint(checkpoint)
    torch.manual_seed(0)
    layer = torch.randn(64, 128, dtype=torch.bfloat16)
    ratio = quantize(layer, quantization).nbytes / layer.nbytes
    plain, fit = estimate_fit(report, DEVICE), estimate_fit(report, DEVICE, quantization=quantization)
    assert isinstance(report.config, ModelConfig)
    head = report.config.vocab_size * report.config.hidden_size * (1 if report.config.tie_word_embeddings else 2)
    layers = plain.weight_bytes - 2 * head
    if quantization == "fp8":  # converted back on the CPU
        assert fit.weight_bytes == plain.weight_bytes
        ratio = 0.5
        fit = estimate_fit(report, replace(DEVICE, device="cuda"), quantization=quantization)
    codes = quantize_head(torch.randn(report.config.vocab_size, report.config.hidden_size)).nbytes
    more = codes if quantization == "int8" else 0
    assert fit.weight_bytes == pytest.approx(2 * head + ratio * layers + more, rel=0.02)
    edit_config(checkpoint, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"})
    with pytest.raises(ValueError, match="already quantized"):
        estimate_fit(inspect_checkpoint(checkpoint), DEVICE, quantization=quantization)


def test_the_fit_of_a_cache_in_8_bits(checkpoint: Path) -> None:
    report = inspect_checkpoint(checkpoint)
    plain, fit = estimate_fit(report, DEVICE, context=256), estimate_fit(report, DEVICE, context=256, kv_dtype="int8")
    assert plain.kv_token_bytes is not None
    assert fit.kv_token_bytes == int(plain.kv_token_bytes * 17 / 32)
    assert plain.streams is not None
    assert fit.streams == pytest.approx(plain.streams * 32 / 17, rel=0.01)
    assert fit.batch_tokens_per_second > plain.batch_tokens_per_second  # type: ignore[operator]


def test_the_fit_of_kept_blocks(tmp_path: Path, checkpoint: Path) -> None:
    model = FamilyModel(CASES["llama"], tmp_path / "llama")
    write_gguf("Llama", model.directory, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q4_0)
    report = inspect_checkpoint(tmp_path / "model.gguf")
    assert report.config is not None
    plain, fit = (estimate_fit(report, DEVICE, quantization=name).weight_bytes for name in ("none", "gguf"))
    assert plain - fit == report.kept_values * (2 - 0.75)
    assert 0 < report.kept_values < report.float_values
    wide = replace(DEVICE, dtype="float32")
    assert estimate_fit(report, wide, quantization="gguf").weight_bytes == estimate_fit(report, wide).weight_bytes
    with pytest.raises(ValueError, match=r"is not a \.gguf file"):
        estimate_fit(inspect_checkpoint(checkpoint), DEVICE, quantization="gguf")


def test_a_model_that_does_not_fit_says_what_to_change(checkpoint: Path) -> None:
    report = inspect_checkpoint(checkpoint)
    small = replace(DEVICE, free_bytes=(256 << 20) + report.weight_bytes(2) + (1 << 20))
    default = estimate_fit(report, small)
    assert default.problem is not None
    assert "MILLRACE_KV_CACHE_MEMORY" in default.problem
    assert estimate_fit(report, small, kv_memory=0.5).problem is None
    tiny = estimate_fit(report, DEVICE, kv_memory=1 << 14)
    assert tiny.problem is not None
    with pytest.raises(ValueError, match="exceeds"):
        estimate_fit(report, DEVICE, context=CONTEXT + 1)


def test_a_tokenizer_that_is_converted_is_inspected(checkpoint: Path) -> None:
    vocab = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "vocab.json").write_text(json.dumps(vocab))
    (checkpoint / "merges.txt").write_text("#version: 0.2\n")
    settings = {"tokenizer_class": "Qwen2Tokenizer", "chat_template": TEMPLATE}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings))
    before = sorted(checkpoint.iterdir())
    report = inspect_checkpoint(checkpoint)
    assert (report.problems, report.tokenizer, report.has_chat_template) == ((), "BPE (bytes)", True)
    assert sorted(checkpoint.iterdir()) == before
    (checkpoint / "tokenizer.json").symlink_to(checkpoint.parent / "outside")
    assert inspect_checkpoint(checkpoint).is_supported
    assert not (checkpoint.parent / "outside").exists()
    shutil.rmtree(checkpoint)
    assert len(vocab) < VOCAB
