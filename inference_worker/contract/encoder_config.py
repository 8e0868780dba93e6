"""Configurations of embedding models: encoders of the BERT family and their pooling.

Does not import torch: the gateway reads a model's limits with this module.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from inference_worker.contract.config import ConfigReader, ModelConfig, ModelError, read_json

Pooling = Literal["mean", "cls"]
# Architectures that count positions from the padding token's id + 1, as RoBERTa does.
_COUNTS_FROM_PADDING = {"BertModel": False, "RobertaModel": True, "XLMRobertaModel": True}
_POOLING_FLAGS: dict[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The shape of an encoder, from a Hugging Face directory with or without the files of sentence-transformers."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int  # rows of the position table
    first_position: int  # of the first token
    num_token_types: int
    layer_norm_eps: float
    max_model_len: int  # tokens of one input
    pooling: Pooling
    normalize: bool  # vectors have length 1
    shorter: tuple[int, ...]  # lengths to which vectors may be truncated
    dtype: str  # of the checkpoint: "bfloat16", "float16" or "float32"

    @classmethod
    def from_dir(cls, path: str | Path) -> EncoderConfig:
        """Read and check the model directory `path`.

        Raises:
            ModelError: a file is missing or not JSON, or the engine does not support the model.
        """
        directory = Path(path)
        raw = read_json(directory / "config.json")
        read = ConfigReader(raw, directory / "config.json")
        architecture = read.architecture()
        if architecture not in _COUNTS_FROM_PADDING:
            raise read.error(f"architecture {architecture!r} is not a supported encoder")
        for key, expected in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
            if (value := raw.get(key, expected)) != expected:
                raise read.error(f"{key} {value!r} is not supported; want {expected}")
        hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads", maximum=4096)
        if hidden % heads:
            raise read.error(f"{hidden} values do not divide into {heads} heads")
        positions = read.integer("max_position_embeddings")
        first = _padding_token(raw) + 1 if _COUNTS_FROM_PADDING[architecture] else 0
        pooling, normalize = _pooling(directory)
        return cls(
            architecture=architecture,
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.integer("intermediate_size"),
            num_layers=read.integer("num_hidden_layers", maximum=4096),
            num_heads=heads,
            num_positions=positions,
            first_position=first,
            num_token_types=read.integer("type_vocab_size", default=2),
            layer_norm_eps=read.number("layer_norm_eps", 1e-12),
            max_model_len=min(positions - first, _max_seq_length(directory) or positions),
            pooling=pooling,
            normalize=normalize,
            shorter=_shorter_dimensions(raw, hidden),
            dtype=read.dtype(),
        )


def read_model_config(directory: Path) -> ModelConfig | EncoderConfig:
    """Read the configuration in the model directory: a decoder, which generates text, or an encoder, which embeds.

    Raises:
        ModelError: the engine does not support the model.
    """
    architecture = ConfigReader(read_json(directory / "config.json"), directory / "config.json").architecture()
    return (EncoderConfig if architecture in _COUNTS_FROM_PADDING else ModelConfig).from_dir(directory)


def _padding_token(raw: dict[str, Any]) -> int:
    value = raw.get("pad_token_id")
    return value if isinstance(value, int) else 1


def _max_seq_length(directory: Path) -> int | None:
    """Return the maximum input length of sentence-transformers. Longer inputs are rejected, never truncated."""
    path = directory / "sentence_bert_config.json"
    if not path.exists():
        return None
    settings = read_json(path)
    if settings.get("do_lower_case"):
        raise ModelError(f"{path}: do_lower_case is not supported")
    return ConfigReader(settings, path).integer("max_seq_length") if settings.get("max_seq_length") else None


def _pooling(directory: Path) -> tuple[Pooling, bool]:
    """Return the pooling, and whether vectors are normalized. As in sentence-transformers, the default is the mean."""
    path = directory / "modules.json"
    if not path.exists():
        return "mean", False
    module_paths = {}
    for module in _read_list(path):
        module_type = str(module.get("type", "")).rpartition(".")[2]
        if module_type not in _MODULES:
            raise ModelError(f"{path}: the module {module_type!r} is not supported; want one of {', '.join(_MODULES)}")
        module_paths[module_type] = str(module.get("path", ""))
    if not re.fullmatch(r"\w+", module_paths.get("Pooling", "")):
        raise ModelError(f"{path}: names no directory for Pooling")
    settings = read_json(directory / module_paths["Pooling"] / "config.json")
    modes = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _POOLING_FLAGS:
        raise ModelError(f"{path}: pooling by {modes} is not supported; want one of {', '.join(_POOLING_FLAGS)}")
    return _POOLING_FLAGS[modes[0]], "Normalize" in module_paths


def _read_list(path: Path) -> list[dict[str, Any]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size < 1 << 20 else None
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelError(f"{path}: cannot be read as JSON: {exc}") from None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ModelError(f"{path}: want a list of JSON objects")
    return value


def _shorter_dimensions(raw: dict[str, Any], hidden: int) -> tuple[int, ...]:
    """Return the shorter vector lengths that a Matryoshka model was trained for."""
    dimensions = raw.get("matryoshka_dimensions")
    if not isinstance(dimensions, list):
        return ()
    return tuple(sorted(count for count in dimensions if isinstance(count, int) and 0 < count < hidden))
