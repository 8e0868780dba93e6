"""The choice of dtype, kernels and attention on each class of CPU: the table in docs/reference/model-formats.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_worker.contract.engine_config import EngineConfig
from inference_worker.engine import compute_path
from inference_worker.engine.architectures import layers
from inference_worker.engine.attention.base import AttentionSpec, CacheShape
from inference_worker.engine.attention.registry import make_backend
from inference_worker.engine.compute_path import choose_path, is_fast_in_pytorch
from inference_worker.engine.embeddings.embedding_runner import default_dtype
from kernels.native.build import runnable_variants
from kernels.native.library import Library, load_library
from tests.support.engine.families import CASES, FamilyModel, generate

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "model-formats.md"
OPTIONS: dict[str, dict[str, Any]] = {
    "dtype `auto`": {},
    "dtype `bfloat16`": {"dtype": "bfloat16"},
    "dtype `float16`, with AVX-512 FP16": {"dtype": "float16"},
    "dtype `float32`": {"dtype": "float32"},
    "`quantization=int8`": {"quantization": "int8"},
    "`quantization=int4`": {"quantization": "int4"},
    "`quantization=int8`, dtype `float32`": {"quantization": "int8", "dtype": "float32"},
    "`kv_cache_dtype=int8`": {"kv_cache_dtype": "int8"},
    "`kv_cache_dtype=int8`, dtype `float32`": {"kv_cache_dtype": "int8", "dtype": "float32"},
    "`kv_cache_dtype=fp8`": {"kv_cache_dtype": "fp8"},
    "batch-invariant mode": {"batch_invariant": True},
    "embedding models": {"dtype": "encoder"},
    "embedding models, `quantization=int8`": {"dtype": "encoder", "quantization": "int8"},
}
WITH_16_BITS = ("amx", "avx512", "no kernels, AVX-512")


def read_table() -> dict[tuple[str, str], str]:
    """Return the cells of the page's table by row and column."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    start = next(index for index, line in enumerate(lines) if line.startswith("| options |"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start : start + 2 + len(OPTIONS)]]
    columns = [name.strip("`") for name in rows[0][1:]]
    return {(row[0], column): cell for row in rows[2:] for column, cell in zip(columns, row[1:], strict=True)}


def describe_choice(options: dict[str, Any]) -> str:
    """Return the choice for these options as the table has it."""
    config = EngineConfig(Path("model"), **options | {"dtype": options.get("dtype", "auto").replace("encoder", "auto")})
    is_encoder = options.get("dtype") == "encoder"
    try:
        path = choose_path(default_dtype(config) if is_encoder else config.dtype, "cpu")
        if not is_encoder:
            shape = CacheShape(
                1, 2, 32, 1, 32, path.dtype, path.device, kv_dtype=config.kv_cache_dtype, kernels=path.kernels
            )
            name = "invariant" if config.batch_invariant else "auto"
            _, choice = make_backend(name, shape, 1, [AttentionSpec(0.2)])
            assert (choice.name == "native") == (path.kernels is not None)
            assert not choice.fallback
    except ValueError as exc:
        assert "; set " in str(exc) or ", or set " in str(exc)  # the nearest option that is supported
        return "refused"
    return f"{path.dtype_name}, {'slow' if path.kernels is None else 'fast'}"


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
    variant = "avx2" if "avx2" in runnable_variants() else "generic"
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
        found[row, column] = describe_choice(OPTIONS[row])
    assert found == cells


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
    line = next(record.message for record in caplog.records if record.message.startswith("CPU: C kernels"))
    assert f"({narrow.variant})" in line
    assert "attention native" in line
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


@pytest.mark.parametrize("limit", ["AVX2", "avx2_vnni", "SSE41"])
def test_pytorch_is_limited_as_its_own_products_are(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert is_fast_in_pytorch(torch.float32)
    assert not is_fast_in_pytorch(torch.bfloat16)
    assert not is_fast_in_pytorch(torch.float16)


def test_a_machine_that_computes_without_the_kernels_is_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_path(kernels="pytorch").slow == "set MILLRACE_CPU_KERNELS to auto"
    assert "several times slower than the C kernels" in caplog.text
    assert choose_path("float32").slow == choose_path().slow == ""
    limit_machine(monkeypatch, has_16_bits=False, library=None)
    assert choose_path().slow.endswith("install a C compiler")
