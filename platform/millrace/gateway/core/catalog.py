"""The models this platform serves, as the gateway needs them: to count, check and name, not to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inference_worker.contract.encoder_config import EncoderConfig, read_model_config
from inference_worker.contract.settings import ModelSpec
from inference_worker.contract.tokenizer import Tokenizer
from inference_worker.models.model_source import ensure_model

DEFAULT_MAX_OUTPUT = 1024  # tokens, for a request that does not say


@dataclass(frozen=True)
class ServedModel:
    """One deployment."""

    name: str
    tokenizer: Tokenizer
    context_length: int  # tokens, prompt and answer together, or of one input to embed
    vocab_size: int
    created: int  # Unix seconds
    # Of a model that embeds, and does not answer: how many numbers a vector may have, the most last.
    vector_sizes: tuple[int, ...] = ()
    default_max_output: int = DEFAULT_MAX_OUTPUT
    folder: Path = Path()  # of its files, for the prompt processes


def load_catalog(specs: Sequence[ModelSpec], data_dir: Path) -> Mapping[str, ServedModel]:
    """Read each model's tokenizer and limits."""
    tokenizers: dict[Path, Tokenizer] = {}  # deployments of one model share it: a prompt is counted once for all
    return {spec.name: _load(spec, data_dir, tokenizers) for spec in specs}


def _load(spec: ModelSpec, data_dir: Path, tokenizers: dict[Path, Tokenizer]) -> ServedModel:
    folder = ensure_model(spec, data_dir, None)
    config = read_model_config(folder)
    if folder not in tokenizers:
        tokenizers[folder] = Tokenizer.from_dir(folder)
    return ServedModel(
        name=spec.name,
        tokenizer=tokenizers[folder],
        context_length=min(config.max_model_len, spec.max_model_len or config.max_model_len),
        vocab_size=config.vocab_size,
        vector_sizes=(*config.shorter, config.hidden_size) if isinstance(config, EncoderConfig) else (),
        folder=folder,
        created=int((folder / "config.json").stat().st_mtime),
    )
