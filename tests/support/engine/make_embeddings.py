"""Generator of `tests/data/embeddings/reference.npy`. It takes about a minute on two cores.

Run: `python -m tests.support.engine.make_embeddings`.

The vectors are the mean over the tokens of the hidden states of transformers' BertModel, computed for each text
separately in float32 and normalized. They are stored in 16 bits, which changes a cosine distance by less than 1e-7.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.settings import ModelSpec

DATA = Path(__file__).parents[2] / "data/embeddings"
MINILM = ModelSpec("all-minilm-l6-v2", "embedded:minilm", "auto")


def texts() -> list[str]:
    with gzip.open(DATA / "texts.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


@torch.inference_mode()
def mean_states(model: Any, inputs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the mean of the model's hidden states over the tokens of each input, one input at a time."""
    return torch.cat([model(torch.tensor([each])).last_hidden_state.mean(dim=1) for each in inputs])


def main() -> None:
    from transformers import BertModel  # here, because the benchmark that imports this module does not need it

    folder = ensure_model(MINILM, Path())
    tokenizer = Tokenizer.from_dir(folder)
    inputs = [tokenizer.encode(text) for text in texts()]
    reference = normalize(mean_states(BertModel.from_pretrained(folder).eval(), inputs))
    np.save(DATA / "reference.npy", reference.numpy().astype(np.float16))


if __name__ == "__main__":
    main()
