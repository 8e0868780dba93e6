"""Sentence vectors of the embedded model MiniLM, computed by the embedding engine, for benchmarks of similarity."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request
from inference_worker.contract.settings import ModelSpec
from inference_worker.engine.embeddings.embedding_engine import EmbeddingEngine

Matrix = NDArray[np.float32]
MODEL = ModelSpec("all-minilm-l6-v2", "embedded:minilm", "auto")
MAX_INPUTS = 1024  # inputs of a request


def sentence_vectors(texts: Sequence[str], directory: Path | None = None) -> Matrix:
    """Return one vector of length 1 for each text.

    Args:
        directory: where vectors are stored for later runs with the same texts.
    """
    stored = None
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256("\0".join((MODEL.name, *texts)).encode()).hexdigest()
        stored = directory / f"{digest[:16]}.npy"
        if stored.exists():
            vectors: Matrix = np.load(stored)
            return vectors
    vectors = _compute(texts)
    if stored is not None:
        np.save(stored, vectors)
    return vectors


def _compute(texts: Sequence[str]) -> Matrix:
    model = ensure_model(MODEL, Path())
    tokenizer = Tokenizer.from_dir(model)
    engine = EmbeddingEngine(EngineConfig(model, measure_peaks=False))
    inputs = [tokenizer.encode(text)[: engine.max_model_len] for text in texts]
    parts: list[Matrix] = []
    for start in range(0, len(inputs), MAX_INPUTS):
        batch = inputs[start : start + MAX_INPUTS]
        tokens = [token for item in batch for token in item]
        engine.add_request(Request(f"r{start}", tokens, input_lengths=tuple(map(len, batch))))
        while engine.has_unfinished():
            for output in engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error.message)
                parts.append(np.frombuffer(output.vectors, np.float32).reshape(len(batch), -1))
    vectors = np.concatenate(parts)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)
