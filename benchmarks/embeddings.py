"""Embedding with the engine compared with transformers: the same weights and texts, in turn.

    python -m benchmarks.embeddings [--threads 1] [--rounds 5]

The texts are those of `tests/data/embeddings`, 6 to 251 tokens each. transformers gets batches of 32, padded to the
longest text, in the texts' order and sorted by length (as in sentence-transformers). The engine gets all texts in one
request, and as requests of one text each, in steps of the worker's profile. The minimum time of the rounds counts. With
--quick the engine embeds a few texts, and transformers is not required.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import parse
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.engine_config import PROFILES, EngineConfig
from inference_worker.contract.request import Request
from inference_worker.engine.embeddings.embedding_engine import EmbeddingEngine
from tests.support.engine.make_embeddings import MINILM, texts

BATCH = 32
Inputs = list[list[int]]
SORTED = "transformers, sorted by length"


@torch.inference_mode()
def embed_padded(model: Any, inputs: Inputs) -> None:
    for start in range(0, len(inputs), BATCH):
        batch = inputs[start : start + BATCH]
        ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (item, used) in enumerate(zip(batch, map(len, batch), strict=True)):
            ids[row, :used], mask[row, :used] = torch.tensor(item), 1
        hidden = model(ids, attention_mask=mask).last_hidden_state * mask[:, :, None]
        torch.nn.functional.normalize(hidden.sum(1) / mask.sum(1, keepdim=True), dim=1)


def embed_packed(engine: EmbeddingEngine, requests: Sequence[Inputs]) -> None:
    for number, inputs in enumerate(requests):
        tokens = [token for item in inputs for token in item]
        engine.add_request(Request(f"r{number}", tokens, input_lengths=tuple(map(len, inputs))))
    while engine.has_unfinished():
        engine.step()


def _peers(directory: Path, inputs: Inputs) -> dict[str, Callable[[], None]]:
    """Return the transformers functions by name."""
    try:
        from transformers import BertModel
    except ImportError:
        raise SystemExit("the package `transformers` is not installed: run `make lint` once, or use --quick") from None
    ordered = sorted(inputs, key=len, reverse=True)
    model = BertModel.from_pretrained(directory).eval()
    return {
        "transformers, in the texts' order": lambda: embed_padded(model, inputs),
        SORTED: lambda: embed_padded(model, ordered),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the least time counts (default 5)")
    parser.add_argument("--texts", type=int, default=500, help="texts to embed (default 500, which are all)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the engine (default %(default)s)")
    parser.add_argument("--cpu-kernels", default="auto", choices=("auto", "pytorch"), help="default auto")
    options = parse(parser, {"rounds": 1, "texts": 20})
    torch.set_num_threads(options.threads)
    directory = ensure_model(MINILM, Path())
    tokenizer = Tokenizer.from_dir(directory)
    inputs = [tokenizer.encode(text) for text in texts()[: options.texts]]
    functions = {} if options.quick else _peers(directory, inputs)
    for (profile_name, profile), dtype in product(PROFILES.items(), options.dtypes.split(",")):
        name = f"{profile_name} in {dtype}"
        engine = EmbeddingEngine(
            EngineConfig(
                directory, max_num_batched_tokens=profile.max_num_batched_tokens, max_num_seqs=profile.max_num_seqs,
                dtype=dtype, cpu_kernels=options.cpu_kernels, measure_peaks=False,
            )
        )  # fmt: skip
        functions[f"engine, {name}, one request"] = partial(embed_packed, engine, [inputs])
        functions[f"engine, {name}, {len(inputs)} requests"] = partial(embed_packed, engine, [[i] for i in inputs])
    seconds = dict.fromkeys(functions, float("inf"))
    for _ in range(options.rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    tokens, minimum = sum(map(len, inputs)), seconds.get(SORTED, min(seconds.values()))
    print(f"{len(inputs)} texts, {tokens} tokens, {options.threads} threads, best of {options.rounds}\n")
    print(f"| | seconds | tokens/s | of {SORTED if SORTED in seconds else 'the quickest'} |\n|---|---|---|---|")
    for name, took in seconds.items():
        print(f"| {name} | {took:.2f} | {tokens / took:,.0f} | {minimum / took:.2f} × |")


if __name__ == "__main__":
    main()
