"""Embedding beside transformers (the package `transformers` is needed): the same weights and texts, in turn.

    python -m benchmarks.embeddings [--threads 1] [--rounds 5]

The texts are those of `tests/data/embeddings`, 6 to 251 tokens each. transformers gets batches of 32, padded to the
longest in each, in the texts' order and sorted by length (which is what sentence-transformers does). The engine gets
all in one request, and as requests of one text each, in steps of the size that the worker's profile has. Of the rounds
the least time counts. With --quick the engine embeds a few texts, and transformers is not needed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import parse
from inference_worker.contract.config import PROFILES, EngineConfig
from inference_worker.contract.request import Request
from inference_worker.contract.tokenizer import Tokenizer
from inference_worker.engine.embeddings.embedding_engine import EmbeddingEngine
from inference_worker.models.model_source import ensure_model
from tests.engine.make_embeddings import MINILM, texts

BATCH = 32
Inputs = list[list[int]]
SORTED = "transformers, sorted by length"


@torch.inference_mode()
def padded(model: Any, inputs: Inputs) -> None:
    for start in range(0, len(inputs), BATCH):
        batch = inputs[start : start + BATCH]
        ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (each, used) in enumerate(zip(batch, map(len, batch), strict=True)):
            ids[row, :used], mask[row, :used] = torch.tensor(each), 1
        hidden = model(ids, attention_mask=mask).last_hidden_state * mask[:, :, None]
        torch.nn.functional.normalize(hidden.sum(1) / mask.sum(1, keepdim=True), dim=1)


def packed(engine: EmbeddingEngine, requests: Sequence[Inputs]) -> None:
    for number, inputs in enumerate(requests):
        tokens = [token for each in inputs for token in each]
        engine.add_request(Request(f"r{number}", tokens, input_lengths=tuple(map(len, inputs))))
    while engine.has_unfinished():
        engine.step()


def _peers(folder: Path, inputs: Inputs) -> dict[str, Callable[[], None]]:
    """Return what transformers does, by name."""
    try:
        from transformers import BertModel
    except ImportError:
        raise SystemExit("the package `transformers` is not installed: run `make lint` once, or use --quick") from None
    ordered = sorted(inputs, key=len, reverse=True)
    model = BertModel.from_pretrained(folder).eval()
    return {
        "transformers, in the texts' order": lambda: padded(model, inputs),
        SORTED: lambda: padded(model, ordered),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the least time counts (default 5)")
    parser.add_argument("--texts", type=int, default=500, help="texts to embed (default 500, which are all)")
    options = parse(parser, {"rounds": 1, "texts": 20})
    torch.set_num_threads(options.threads)
    folder = ensure_model(MINILM, Path())
    tokenizer = Tokenizer.from_dir(folder)
    inputs = [tokenizer.encode(text) for text in texts()[: options.texts]]
    ways = {} if options.quick else _peers(folder, inputs)
    for name, profile in PROFILES.items():
        engine = EmbeddingEngine(
            EngineConfig(
                folder, max_num_batched_tokens=profile.max_num_batched_tokens, max_num_seqs=profile.max_num_seqs
            )
        )
        ways[f"engine, {name}, one request"] = partial(packed, engine, [inputs])
        ways[f"engine, {name}, {len(inputs)} requests"] = partial(packed, engine, [[i] for i in inputs])
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(options.rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    tokens, least = sum(map(len, inputs)), seconds.get(SORTED, min(seconds.values()))
    print(f"{len(inputs)} texts, {tokens} tokens, {options.threads} threads, best of {options.rounds}\n")
    print(f"| | seconds | tokens/s | of {SORTED if SORTED in seconds else 'the quickest'} |\n|---|---|---|---|")
    for name, took in seconds.items():
        print(f"| {name} | {took:.2f} | {tokens / took:,.0f} | {least / took:.2f} × |")


if __name__ == "__main__":
    main()
