"""The quality of each dtype, quantization and set of kernels: perplexity, and agreement with float32 of the same
checkpoint.

    python -m benchmarks.quality                   # the embedded model
    python -m benchmarks.quality DIR --json
    python -m benchmarks.quality --kernels all --configurations bfloat16,int8
    python -m benchmarks.quality --dither

The text is "Alice's Adventures in Wonderland" (tests/data/text), in prompts of --context tokens. The engine scores them
with prompt_logprobs. Agreement is the share of positions at which the most likely token is that of float32. Divergence
is the mean Kullback-Leibler divergence of the next token's probabilities from those of float32, in thousandths of a
nat, at evenly spaced positions. It shows rounding errors that the other numbers hide.

The publisher of the embedded checkpoint quantized it to q4_1, 4 bits in groups of 32. So 4 bits lose less on it than on
other models.

--dither adds random numbers within the step of these 4 bits to the matrices of the layers. The weights then have the
statistics of a checkpoint that was never quantized, and float32 of them is the reference.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file, save_file

from benchmarks.options import parse
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.engine_config import (
    CpuKernelsName,
    DTypeName,
    EngineConfig,
    KVCacheDTypeName,
    QuantizationName,
)
from inference_worker.contract.request import Request, SamplingParams
from inference_worker.contract.settings import ModelSpec
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.model_runner import ModelRunner
from kernels.native.build import runnable_variants
from tests.support.models import models_data_dir

TEXT = Path(__file__).resolve().parents[1] / "tests" / "data" / "text" / "alice.txt.gz"
REFERENCE = "float32"
# The dtype, the quantization of the weights, and the dtype of the KV cache.
CONFIGURATIONS: dict[str, tuple[DTypeName, QuantizationName, KVCacheDTypeName]] = {
    REFERENCE: ("float32", "none", "auto"),
    "default": ("auto", "none", "auto"),
    "bfloat16": ("bfloat16", "none", "auto"),
    "bfloat16-kv-int8": ("bfloat16", "none", "int8"),
    "bfloat16-kv-fp8": ("bfloat16", "none", "fp8"),
    "int8": ("bfloat16", "int8", "auto"),
    "int8-kv-int8": ("bfloat16", "int8", "int8"),
    "int4": ("bfloat16", "int4", "auto"),
    "int4-g64": ("bfloat16", "int4-g64", "auto"),
    "int4-g128": ("bfloat16", "int4-g128", "auto"),
    "fp8": ("bfloat16", "fp8", "auto"),
    "gguf": ("bfloat16", "gguf", "auto"),  # only of a .gguf file
}
# Maximum change of the perplexity of the embedded model with --check, in percent.
MAX_CHANGES = {"bfloat16": 0.1, "bfloat16-kv-int8": 0.2, "int8": 0.5, "int8-kv-int8": 0.5, "int4": 0.5}
# Least agreement with --check, in percent.
MIN_AGREEMENTS = {"bfloat16": 98.0, "bfloat16-kv-int8": 97.5, "int8": 97.0, "int8-kv-int8": 97.0, "int4": 98.0}
MAX_DIVERGENCES = {"default": 0.4, "bfloat16": 0.4}
GROUP = 32  # weights in a block of q4_1
MAX_POSITIONS = 512  # at which the divergence is measured; a distribution of the embedded model takes 200 KB


@dataclass(frozen=True)
class Quality:
    """The quality of one configuration."""

    kernels: str
    configuration: str
    tokens: int
    perplexity: float
    change_percent: float  # change of the perplexity from float32
    agreement_percent: float
    divergence: float  # KL of the next token from float32, in thousandths of a nat
    seconds: float


@dataclass(frozen=True)
class Scores:
    """The negative log-likelihood of the tokens, the most likely token at each position, and distributions.

    Args:
        log_probs: float32 [positions, vocabulary], of each `step`-th position.
    """

    loss: float
    best: list[int]
    log_probs: torch.Tensor
    seconds: float

    def divergence(self, reference: Scores) -> float:
        """Return the mean divergence from the probabilities of `reference`, in thousandths of a nat."""
        divergences = [
            (theirs.exp() * (theirs - own)).sum(-1)
            for own, theirs in zip(*(torch.split(x, 64) for x in (self.log_probs, reference.log_probs)), strict=True)
        ]
        return 1000 * float(torch.cat(divergences).mean())


def start_engine(directory: Path, name: str, options: argparse.Namespace, kernels: CpuKernelsName) -> LLMEngine:
    dtype, quantization, kv_dtype = CONFIGURATIONS[name]
    return LLMEngine(
        EngineConfig(
            directory, device=options.device, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_dtype,
            prefix_cache=False, max_num_seqs=1, max_model_len=options.context + 1, threads=options.threads,
            measure_peaks=False, cpu_kernels=kernels,
        )
    )  # fmt: skip


def score(engine: LLMEngine, prompts: Sequence[Sequence[int]]) -> Scores:
    """Return the scores of all tokens but the first of each prompt."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    loss, best, started = 0.0, [], time.perf_counter()
    with record_log_probs(engine, prompts) as log_probs:
        for index, prompt in enumerate(prompts):
            engine.add_request(Request(f"p{index}", list(prompt), params))
            while engine.has_unfinished():
                for output in engine.step():
                    if output.error is not None:
                        raise RuntimeError(output.error.message)
                    for token in output.prompt_logprobs or ():
                        loss -= token.logprob
                        best.append(token.top[0][0])
    return Scores(loss, best, torch.cat(log_probs), time.perf_counter() - started)


@contextmanager
def record_log_probs(engine: LLMEngine, prompts: Sequence[Sequence[int]]) -> Iterator[list[torch.Tensor]]:
    """Record distributions of the prompts that are computed one after another: of at most MAX_POSITIONS positions."""
    # A prompt has as many rows of logits as tokens: each position but the last, and then the sampled token.
    rows = [index for prompt in prompts for index in [*range(len(prompt) - 1), -1]]
    positions = [place for place, index in enumerate(rows) if index >= 0]
    kept = set(positions[:: -(-len(positions) // MAX_POSITIONS)])
    found: list[torch.Tensor] = []
    place = 0
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    compute = runner.model.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal place
        computed = compute(hidden)
        chosen = [index for index in range(len(computed)) if place + index in kept]
        if chosen:
            found.append(computed[chosen].float().log_softmax(-1).cpu())
        place += len(computed)
        return computed

    runner.model.logits = logits  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del runner.model.logits


def compare(directory: Path, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> list[Quality]:
    """Return the quality of float32, and of each configuration with each set of kernels."""
    variants: Any = [*runnable_variants(), "pytorch"] if options.kernels == "all" else [options.kernels]
    names = [name for name in options.configurations.split(",") if name != REFERENCE]
    found: list[Quality] = []
    reference = None
    for kernels, name in [(variants[0], REFERENCE), *((kernels, name) for kernels in variants for name in names)]:
        if name == "gguf" and options.kept is None:
            continue
        if kernels == "pytorch" and CONFIGURATIONS[name][2] != "auto":
            continue  # refused
        place = options.kept if name == "gguf" else directory
        scores = score(start_engine(place, name, options, kernels), prompts)
        reference = reference or scores
        count = len(scores.best)
        equal = sum(a == b for a, b in zip(scores.best, reference.best, strict=True))
        perplexity, base = (math.exp(loss / count) for loss in (scores.loss, reference.loss))
        found.append(
            Quality(
                kernels, name, count, round(perplexity, 4), round(100 * (perplexity / base - 1), 3),
                round(100 * equal / count, 2), round(scores.divergence(reference), 4), round(scores.seconds, 1),
            )
        )  # fmt: skip
        if not options.json:
            row = found[-1]
            print(
                f"{kernels:>12} {name:>16} {perplexity:>12.3f} {row.change_percent:>+9.2f} %"
                f" {row.agreement_percent:>9.2f} % {row.divergence:>10.3f} {row.seconds:>8.1f}",
                flush=True,
            )
    return found


def read_text(directory: Path, options: argparse.Namespace) -> list[list[int]]:
    """Return the beginning of the book in prompts of equal length."""
    ids = Tokenizer.from_dir(directory).encode(gzip.decompress(TEXT.read_bytes()).decode("ascii"))
    count = math.ceil(options.tokens / (options.context - 1))
    if len(ids) < count * options.context:
        raise SystemExit(f"the text has {len(ids)} tokens: set --tokens to less")
    return [ids[index * options.context : (index + 1) * options.context] for index in range(count)]


def dither(source: Path, target: Path) -> None:
    """Write the model with uniform random numbers within the step of q4_1 added to the matrices of its layers."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    random = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            groups = tensor.float().view(len(tensor), -1, GROUP)
            low, high = groups.aminmax(dim=-1, keepdim=True)
            noise = torch.rand(groups.shape, generator=random) - 0.5
            tensors[name] = (groups + noise * (high - low) / 15).view(tensor.shape)
    save_file(tensors, target / "model.safetensors")


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as place:
        source = options.directory or "embedded"
        data_dir = Path(place) if options.directory else models_data_dir()
        directory = ensure_model(ModelSpec("model", source, "auto"), data_dir)
        options.kept = None  # the model with the blocks of its file
        if not options.dither and not Path(source).is_dir() and "gguf" in options.configurations.split(","):
            options.kept = ensure_model(ModelSpec("model", source, "auto", quantization="gguf"), data_dir)
        if options.dither:
            published, directory = directory, Path(place) / "dithered"
            dither(published, directory)
        prompts = read_text(directory, options)
        if not options.json:
            print(
                f"{'kernels':>12} {'':>16} {'perplexity':>12} {'change':>11} {'agreement':>11} {'divergence':>10}"
                f" {'seconds':>8}"
            )
        found = compare(directory, prompts, options)
    if options.json:
        rows = [asdict(row) for row in found]
        result = {
            "model": source,
            "dither": options.dither,
            "text": TEXT.name,
            "context": options.context,
            "results": rows,
        }
        print(json.dumps(result))
    if options.check and (failed := [f"{row.configuration} ({row.kernels})" for row in found if exceeds(row)]):
        raise SystemExit(f"not within the limits of perplexity, agreement and divergence: {', '.join(failed)}")


def exceeds(row: Quality) -> bool:
    """Return whether the perplexity, the agreement or the divergence is not within the configuration's limits."""
    is_lower = row.agreement_percent < MIN_AGREEMENTS.get(row.configuration, 0)
    is_changed = abs(row.change_percent) > MAX_CHANGES.get(row.configuration, math.inf)
    return is_lower or is_changed or row.divergence > MAX_DIVERGENCES.get(row.configuration, math.inf)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", help="a model directory or .gguf file (default: the embedded model)")
    parser.add_argument("--tokens", type=int, default=10_000, help="least tokens to score (default 10,000)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a prompt (default 1,024)")
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS), help="default: all")
    parser.add_argument("--dither", action="store_true", help="add random numbers within the step of q4_1")
    parser.add_argument("--device", default="cpu", choices=("auto", "cpu", "cuda"), help="default cpu")
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core (default)")
    parser.add_argument(
        "--kernels", default="auto", choices=("all", *get_args(CpuKernelsName)),
        help="as MILLRACE_CPU_KERNELS; all: each instruction set of this machine, and PyTorch",
    )  # fmt: skip
    parser.add_argument(
        "--check", action="store_true", help="fail if a perplexity, agreement or divergence is not within its limits"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parse(parser, {"tokens": 120, "context": 64, "configurations": "bfloat16,int4"})


if __name__ == "__main__":
    main()
