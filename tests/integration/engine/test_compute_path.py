"""The choice of dtype, kernels and attention on each class of CPU: the table in docs/reference/model-formats.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from inference_worker.contract import env
from inference_worker.contract.compute_support import OptionRefused, SlowReason
from inference_worker.contract.cpu_topology import read_topology
from inference_worker.contract.engine_config import (
    CpuKernelsName,
    DTypeName,
    EngineConfig,
    KVCacheDTypeName,
    QuantizationName,
)
from inference_worker.contract.settings import WorkerSettings
from inference_worker.engine import compute_path
from inference_worker.engine.architectures import layers
from inference_worker.engine.attention import registry
from inference_worker.engine.attention.base import AttentionSpec, CacheShape
from inference_worker.engine.attention.registry import make_backend
from inference_worker.engine.attention.self_check import BackendMismatchError
from inference_worker.engine.compute_path import choose_path, is_fast_in_pytorch, place_engine
from inference_worker.worker.worker import place_worker
from kernels.native.build import runnable_variants
from kernels.native.library import Library, load_library
from tests.support.engine.families import CASES, FamilyModel, generate

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "model-formats.md"
INT4_NAMES = ("int4", "int4-g64", "int4-g128")
OPTIONS: dict[str, list[dict[str, Any]]] = {  # rows, each with sets of options that have the same outcome
    "dtype `auto`": [{}],
    "dtype `bfloat16`": [{"dtype": "bfloat16"}],
    "dtype `float16`, with AVX-512 FP16": [{"dtype": "float16"}],
    "dtype `float32`": [{"dtype": "float32"}],
    "`quantization=int8`": [{"quantization": "int8"}],
    "`quantization=int4`, `int4-g64`, `int4-g128`, `gguf` or `fp8`": [
        {"quantization": name} for name in (*INT4_NAMES, "gguf", "fp8")
    ],
    "`kv_cache_dtype=int8`": [{"kv_cache_dtype": "int8"}],
    "`kv_cache_dtype=int8`, dtype `float16` or `float32`": [
        {"kv_cache_dtype": "int8", "dtype": name} for name in ("float16", "float32")
    ],
    "`kv_cache_dtype=fp8`": [{"kv_cache_dtype": "fp8"}],
    "speculative decoding": [{"speculation": True}, {"speculation": True, "draft_quantization": "int8"}],
    "batch-invariant mode": [{"batch_invariant": True}],
    "embedding models": [{"is_encoder": True}],
    "embedding models, dtype `bfloat16`": [{"is_encoder": True, "dtype": "bfloat16"}],
    "embedding models, dtype `float16`, with AVX-512 FP16, any `quantization`": [
        {"is_encoder": True, "dtype": "float16"}
    ],
    "embedding models, dtype `float32`, any `quantization`": [{"is_encoder": True, "dtype": "float32"}],
    "embedding models, `quantization=int8`": [{"is_encoder": True, "quantization": "int8"}],
    "embedding models, `quantization=int4`, `int4-g64`, `int4-g128` or `fp8`": [
        {"is_encoder": True, "quantization": name} for name in (*INT4_NAMES, "fp8")
    ],
}
FULL_DTYPES = ("torch.float16", "torch.float32")  # in which PyTorch computes embedding models
WITH_16_BITS = ("`amx`, `avx512+bf16`", "no kernels, AVX-512")


def read_table() -> dict[tuple[str, str], str]:
    """Return the cells of the page's table by row and column."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    start = next(index for index, line in enumerate(lines) if line.startswith("| options |"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start : start + 2 + len(OPTIONS)]]
    return {(row[0], column): cell for row in rows[2:] for column, cell in zip(rows[0][1:], row[1:], strict=True)}


def describe_choice(*, is_encoder: bool = False, **options: Any) -> str:
    """Return the choice for these options as the table has it."""
    config = EngineConfig(Path("model"), device="cpu", **options)
    try:
        path = choose_path(config, is_encoder=is_encoder)
        if not is_encoder:
            shape = CacheShape(
                1, 2, 32, 1, 32, path.dtype, path.device, kv_dtype=config.kv_cache_dtype, kernels=path.kernels
            )
            name = "invariant" if config.batch_invariant else "auto"
            _, choice = make_backend(name, shape, 1, [AttentionSpec(0.2)])
            assert (choice.name == "native") == (path.kernels is not None)
            assert not choice.fallback
    except OptionRefused as exc:
        assert "; set " in str(exc)  # the nearest option that is supported
        return "refused"
    return f"{path.dtype_name}, {'fast' if path.slow is None else 'slow'}"


def limit_machine(patch: pytest.MonkeyPatch, *, has_16_bits: bool, library: Library | None) -> None:
    """Let the engine find a CPU with or without PyTorch's 16-bit products, and the C kernels `library`."""

    def is_fast(dtype: torch.dtype) -> bool:
        return dtype == torch.float32 or has_16_bits

    for module in (compute_path, layers):
        patch.setattr(module, "is_fast_in_pytorch", is_fast)
    patch.setattr(compute_path, "load_library", lambda _variant="": library)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """A machine with AVX2 at most, or the instruction set that this one has below AVX-512."""
    variant = "avx2" if "avx2" in runnable_variants() else runnable_variants()[-1]
    library = load_library(variant)
    assert library is not None
    assert library.variant == variant
    limit_machine(monkeypatch, has_16_bits=False, library=library)
    return library


def test_the_table_shows_the_choice_on_each_class_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cells, library = read_table(), load_library()
    assert {row for row, _ in cells} == set(OPTIONS)
    found = {}
    for row, column in cells:
        has_kernels = not column.startswith("no kernels")
        limit_machine(monkeypatch, has_16_bits=column in WITH_16_BITS, library=library if has_kernels else None)
        found[row, column] = " / ".join(sorted({describe_choice(**options) for options in OPTIONS[row]}))
    assert found == cells


def test_the_table_has_a_column_for_each_instruction_set_and_a_row_for_each_option() -> None:
    cells = read_table()
    columns = list(dict.fromkeys(column for _, column in cells))
    assert columns[-2:] == ["no kernels, AVX-512", "no kernels, other"]
    named = [name.strip("`") for column in columns[:-2] for name in column.split(", ")]
    assert sorted(named) == sorted({*get_args(CpuKernelsName)} - {"auto", "pytorch"})
    tried = [options for sets in OPTIONS.values() for options in sets]
    for option, names in (
        ("dtype", DTypeName),
        ("quantization", QuantizationName),
        ("kv_cache_dtype", KVCacheDTypeName),
    ):
        assert {options[option] for options in tried if option in options} == {*get_args(names)} - {"auto", "none"}


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_model_is_served_in_bfloat16_without_avx512(
    quantization: str, narrow: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = FamilyModel(CASES["qwen3"], tmp_path)
    options = {"block_size": 32, "num_blocks": 20, "quantization": quantization, "dtype": "auto", "attention": "auto"}
    kv_dtype = "auto" if quantization == "none" else "int8"
    engine = model.engine(kv_cache_dtype=kv_dtype, **options)
    assert engine._runner.dtype == torch.bfloat16
    line = next(record.message for record in caplog.records if record.message.startswith("CPU: "))
    threads = f"{torch.get_num_threads()} threads of {len(read_topology().cores)}"
    assert line.startswith(f"CPU: {narrow.variant} · {threads} (")
    assert "C kernels · attention native" in line
    assert engine.slow is None
    prompts = {"a": list(range(3, 40))}
    got = generate(engine, prompts, 1)["a"].logits[37].float()
    want = generate(model.engine(dtype="float32", num_blocks=20), prompts, 1)["a"].logits[37].float()
    assert float((got - want).norm() / want.norm()) < 0.05


def test_a_product_that_the_kernels_lack_is_computed_in_float32(narrow: Library) -> None:
    weight, bias, x = torch.randn(40, 50).bfloat16(), torch.randn(40).bfloat16(), torch.randn(7, 50).bfloat16()
    product = layers.Layers(kernels=narrow).linear(weight, bias)
    want = torch.nn.functional.linear(x.float(), weight.float(), bias.float()).bfloat16()
    assert torch.equal(product(x), want)
    assert torch.equal(product.add(x, want), want + want)


def test_an_instruction_set_that_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.native.library.runnable_variants", lambda: ["generic"])
    monkeypatch.setattr("kernels.native.library._load_prebuilt", lambda: None)
    with pytest.raises(ValueError, match="this machine cannot run the CPU kernels for avx2; it can run generic"):
        load_library.__wrapped__("avx2")


def test_a_worker_does_not_start_with_an_instruction_set_that_the_machine_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernels.native.library.runnable_variants", lambda: ["generic"])
    monkeypatch.setattr("kernels.native.library._load_prebuilt", lambda: None)
    monkeypatch.setattr(compute_path, "load_library", load_library.__wrapped__)
    environ = {
        "MILLRACE_VALKEY_URL": "redis://127.0.0.1:1/0",
        "MILLRACE_WORKER_SECRET": "w" * 32,
        "MILLRACE_CPU_KERNELS": "avx2",
    }
    with pytest.raises(SystemExit) as caught:
        place_worker(env.load(WorkerSettings, environ))
    text = "this machine cannot run the CPU kernels for avx2; it can run generic; set it to auto"
    assert str(caught.value) == f"MILLRACE_CPU_KERNELS: {text}"
    with pytest.raises(SystemExit, match="MILLRACE_CPU_NODE: this process may use no CPU of memory node 99"):
        place_worker(env.load(WorkerSettings, environ | {"MILLRACE_CPU_KERNELS": "auto", "MILLRACE_CPU_NODE": "99"}))


@pytest.mark.parametrize("limit", ["AVX2", "avx2_vnni", "SSE41"])
def test_pytorch_is_limited_as_its_own_products_are(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert is_fast_in_pytorch(torch.float32)
    assert not is_fast_in_pytorch(torch.bfloat16)
    assert not is_fast_in_pytorch(torch.float16)


def test_a_slower_backend_has_a_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plain = EngineConfig(Path("model"), device="cpu")
    assert choose_path(plain).slow is None
    assert choose_path(replace(plain, dtype="float32")).slow == SlowReason.DTYPE
    assert choose_path(replace(plain, cpu_kernels="pytorch")).slow == SlowReason.KERNELS_OFF
    assert "Set MILLRACE_CPU_KERNELS to auto, and restart the worker." in caplog.text
    limit_machine(monkeypatch, has_16_bits=False, library=None)
    assert choose_path(plain).slow == SlowReason.KERNELS_MISSING
    assert choose_path(plain, is_encoder=True).slow is None  # float32 is the default of vectors


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"block_size": 16}, SlowReason.BLOCK_SIZE), ({"block_size": 32}, None)],
    ids=["block_size", "default"],
)
def test_attention_without_the_kernels_has_a_reason(
    options: dict[str, Any], reason: SlowReason | None, tmp_path: Path
) -> None:
    engine = FamilyModel(CASES["qwen3"], tmp_path).engine(dtype="bfloat16", attention="auto", num_blocks=20, **options)
    assert engine.slow == reason
    assert engine._runner.attention_choice.name == ("native" if reason is None else "cpu")


@pytest.mark.parametrize("reason", ["mismatch", "error"])
def test_attention_that_failed_its_check_has_a_reason(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BackendMismatchError("differ") if reason == "mismatch" else RuntimeError("no compiler")

    monkeypatch.setattr(registry, "check_backend", fail)
    engine = FamilyModel(CASES["qwen3"], tmp_path).engine(
        dtype="bfloat16", attention="auto", num_blocks=20, block_size=32
    )
    assert engine.slow == SlowReason.ATTENTION
    assert engine._runner.attention_choice.name == "reference"


def test_the_threads_of_the_settings_come_before_those_of_openmp() -> None:
    cores = read_topology().count_threads()
    assert place_engine("cpu", "all", 0, environ={}).threads == cores
    assert place_engine("cpu", "all", 0, environ={"OMP_NUM_THREADS": "7,2"}).threads == 7
    assert place_engine("cpu", "all", 3, environ={"OMP_NUM_THREADS": "7"}).threads == 3


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny decoder and a tiny encoder whose sizes the C kernels support."""
    import transformers

    decoder, encoder = tmp_path_factory.mktemp("decoder"), tmp_path_factory.mktemp("encoder")
    FamilyModel(CASES["qwen3"], decoder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=100, max_position_embeddings=64, **sizes)
    transformers.BertModel(config).eval().save_pretrained(encoder)
    return decoder, encoder


def expect_outcome(cells: dict[tuple[str, str], str], column: str, options: dict[str, str], has_float16: bool) -> str:
    """Return fast, slow or refused: the worst of the table's cells for these options."""
    dtype, quantization, kv_dtype = options["dtype"], options["quantization"], options["kv_cache_dtype"]
    if dtype == "float16" and not has_float16:
        return "refused"
    is_encoder = options["model"] == "encoder"
    of_model = [row for row in OPTIONS if row.startswith("embedding models") == is_encoder]
    quantized = [row for row in of_model if "quantization=" in row and re.search(rf"[`=]{quantization}`", row)]
    if is_encoder and dtype == "auto":
        rows = quantized or ["embedding models"]
    elif is_encoder:
        rows = [row for row in of_model if f"dtype `{dtype}`" in row]
    else:
        rows = [row for row in of_model if row.startswith(f"dtype `{dtype}`")] + quantized
        rows += {"speculation": ["speculative decoding"], "batch-invariant": ["batch-invariant mode"]}.get(
            options["model"], []
        )
    if kv_dtype != "auto":
        is_narrow = kv_dtype == "int8" and dtype in ("float16", "float32")
        rows.append(f"`kv_cache_dtype={kv_dtype}`{', dtype `float16` or `float32`' if is_narrow else ''}")
    found = {cells[row, column].rpartition(", ")[2] for row in rows}
    return next(outcome for outcome in ("refused", "slow", "fast") if outcome in found)


@pytest.mark.parametrize("limit", [{}, {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}], ids=str)
def test_no_combination_of_options_is_slow_in_silence(limit: dict[str, str], tiny_models: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "tests.support.engine.option_combinations", *map(str, tiny_models)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=os.environ | limit)
    assert done.returncode == 0, done.stderr
    results, cells = [json.loads(line) for line in done.stdout.splitlines()], read_table()
    assert {result["kernels"] for result in results} == {*runnable_variants(), "pytorch"}
    wrong = []
    for result in results:
        machine, kernels, options = result["machine"], result["kernels"], result["options"]
        outcome = "refused" if "refused" in result else "died" if "died" in result else "slow"
        if outcome == "slow" and result["slow"] is None:
            # The C kernels compute, or PyTorch the float32 of an encoder.
            is_own = result["native"] or (options["model"] == "encoder" and result["dtype"] in FULL_DTYPES)
            outcome = "fast" if is_own and result["finite"] else "slow in silence"
        column = f"no kernels, {'AVX-512' if machine['bfloat16'] else 'other'}"
        if kernels != "pytorch":
            # PyTorch computes in float16, whichever kernels are named.
            named = "amx" if options["dtype"] == "float16" else kernels
            column = next(name for _, name in cells if f"`{named}`" in name)
        if outcome != expect_outcome(cells, column, options, machine["float16"]):
            wrong.append(result)
    assert wrong == []
