"""Embedding beside transformers: the same weights and texts, in turn.

    python -m benchmarks.embeddings [--threads 1] [--rounds 5]

The texts are those of `tests/data/embeddings`, 6 to 251 tokens each. transformers gets batches of 32, padded to the
longest in each, in the texts' order and sorted by length (which is what sentence-transformers does). The engine gets
all in one request, and as requests of one text each, in steps of the size that the worker's profile has. Of the rounds
the least time counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import BertModel

from inference_worker.engine.config import PROFILES, EngineConfig
from inference_worker.engine.embedding_engine import EmbeddingEngine
from inference_worker.engine.request import Request
from inference_worker.engine.tokenizer import Tokenizer
from inference_worker.model_source import ensure_model
from tests.engine.make_embeddings import MINILM, texts

BATCH = 32
Inputs = list[list[int]]


@torch.inference_mode()
def padded(model: BertModel, inputs: Inputs) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = ensure_model(MINILM, Path())
    tokenizer = Tokenizer.from_dir(folder)
    inputs = [tokenizer.encode(text) for text in texts()]
    ordered = sorted(inputs, key=len, reverse=True)
    model = BertModel.from_pretrained(folder).eval()
    ways: dict[str, Callable[[], None]] = {
        "transformers, in the texts' order": lambda: padded(model, inputs),
        "transformers, sorted by length": lambda: padded(model, ordered),
    }
    for name, profile in PROFILES.items():
        engine = EmbeddingEngine(EngineConfig(folder, step_tokens=profile.step_tokens, max_batch=profile.max_batch))
        ways[f"engine, {name}, one request"] = partial(packed, engine, [inputs])
        ways[f"engine, {name}, {len(inputs)} requests"] = partial(packed, engine, [[i] for i in inputs])
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(options.rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    tokens, least = sum(map(len, inputs)), seconds["transformers, sorted by length"]
    print(f"{len(inputs)} texts, {tokens} tokens, {options.threads} threads, best of {options.rounds}\n")
    print("| | seconds | tokens/s | of transformers sorted |\n|---|---|---|---|")
    for name, took in seconds.items():
        print(f"| {name} | {took:.2f} | {tokens / took:,.0f} | {least / took:.2f} × |")


if __name__ == "__main__":
    main()
