"""What the engine does with each combination of options on this machine, as a line of JSON for each.

python -m tests.support.engine.option_combinations DECODER ENCODER

A process of its own, since oneDNN reads ONEDNN_MAX_CPU_ISA once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from inference_worker.checkpoints.decoder_config import read_decoder_directory
from inference_worker.checkpoints.encoder_config import EncoderConfig
from inference_worker.contract.compute_support import OptionRefused
from inference_worker.contract.engine_config import CpuKernelsName, EngineConfig
from inference_worker.contract.request import Request, SamplingParams
from inference_worker.engine.compute_path import is_fast_in_pytorch
from inference_worker.engine.embeddings.embedding_runner import EmbeddingRunner
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.model_runner import ModelRunner
from kernels.native.build import runnable_variants

DTYPES = ("auto", "bfloat16", "float16", "float32")
QUANTIZATIONS = ("none", "int8", "int4")
KV_DTYPES = ("auto", "int8", "fp8")
MODES: dict[str, dict[str, Any]] = {
    "decoder": {},
    "speculation": {"speculation": True},
    "batch-invariant": {"batch_invariant": True},
}


def list_combinations() -> Iterator[dict[str, str]]:
    """Yield the options of each combination, without the kernels."""
    names = ("model", "dtype", "quantization", "kv_cache_dtype")
    for values in product(("decoder",), DTYPES, QUANTIZATIONS, KV_DTYPES):
        yield dict(zip(names, values, strict=True))
    for values in product(("speculation", "batch-invariant"), ("auto", "float32"), ("none", "int8"), ("auto", "int8")):
        yield dict(zip(names, values, strict=True))
    for values in product(("encoder",), DTYPES, QUANTIZATIONS, ("auto",)):
        yield dict(zip(names, values, strict=True))
    for values in product(("decoder", "encoder"), ("auto",), ("int4-g64", "int4-g128", "fp8"), ("auto",)):
        yield dict(zip(names, values, strict=True))


def run_combination(options: dict[str, str], kernels: CpuKernelsName, decoder: Path, encoder: Path) -> dict[str, Any]:
    """Load the tiny model, compute something, and return how it was done."""
    given: dict[str, Any] = {name: value for name, value in options.items() if name != "model"}
    config = EngineConfig(
        encoder if options["model"] == "encoder" else decoder, device="cpu", cpu_kernels=kernels, num_blocks=8,
        max_num_seqs=2, max_num_batched_tokens=64, measure_peaks=False, **(given | MODES.get(options["model"], {})),
    )  # fmt: skip
    try:
        if options["model"] == "encoder":
            embedder = EmbeddingRunner(config, EncoderConfig.from_dir(encoder))
            vectors = embedder.embed([[3, 4, 5], [6, 7]])
            return {
                "dtype": str(embedder.dtype), "slow": embedder.slow, "native": embedder._kernels is not None,
                "finite": bool(torch.from_numpy(vectors).isfinite().all()),
            }  # fmt: skip
        model = read_decoder_directory(decoder)
        runner = ModelRunner(config, model, model.max_model_len)
        engine = LLMEngine(config, runner=runner, model_config=model)
        engine.add_request(Request("a", list(range(3, 40)), SamplingParams(max_tokens=3, temperature=0)))
        tokens = 0
        while engine.has_unfinished():
            tokens += sum(len(output.token_ids) for output in engine.step())
    except OptionRefused as exc:
        return {"refused": str(exc)}
    except Exception as exc:  # noqa: BLE001  (the test reports each)
        return {"died": f"{type(exc).__name__}: {exc}"}
    native = runner.attention_choice.name == "native"
    return {"dtype": str(runner.dtype), "slow": engine.slow, "native": native, "finite": tokens == 3}


def main() -> None:
    """Print the results for each instruction set of this machine, and for PyTorch."""
    torch.set_num_threads(1)
    decoder, encoder = map(Path, sys.argv[1:])
    machine = {"bfloat16": is_fast_in_pytorch(torch.bfloat16), "float16": is_fast_in_pytorch(torch.float16)}
    names: Any = (*runnable_variants(), "pytorch")
    for kernels in names:
        for options in list_combinations():
            result = run_combination(options, kernels, decoder, encoder)
            print(json.dumps({"kernels": kernels, "machine": machine, "options": options, **result}))  # noqa: T201


if __name__ == "__main__":
    main()
