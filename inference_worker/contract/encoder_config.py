"""What an embedding model is: an encoder of the BERT family, and how its hidden states become one vector.

Free of torch: the gateway reads a model's limits with it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from inference_worker.contract.config import ConfigReader, ModelConfig, ModelError, read_json

Pooling = Literal["mean", "cls"]
# Those that count positions from after the padding token's id, as RoBERTa does.
_COUNTS_FROM_PADDING = {"BertModel": False, "RobertaModel": True, "XLMRobertaModel": True}
_POOLING_FLAGS: dict[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The shape of an encoder, read from a Hugging Face directory, in sentence-transformers' layout or without it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int  # rows of the table of positions
    first_position: int  # the first token's
    num_token_types: int
    layer_norm_eps: float
    max_model_len: int  # tokens of one input
    pooling: Pooling
    normalize: bool  # vectors have the length 1
    shorter: tuple[int, ...]  # numbers of dimensions to which vectors may be cut
    dtype: str  # the checkpoint's own: "bfloat16", "float16" or "float32"

    @classmethod
    def from_dir(cls, path: str | Path) -> EncoderConfig:
        """Read and check the model directory `path`.

        Raises:
            ModelError: a file is missing, not JSON, or describes a model this engine does not serve.
        """
        folder = Path(path)
        raw = read_json(folder / "config.json")
        read = ConfigReader(raw, folder / "config.json")
        architecture = read.architecture()
        if architecture not in _COUNTS_FROM_PADDING:
            raise read.fault(f"architecture {architecture!r} is not an encoder that is served")
        for key, wanted in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
            if (value := raw.get(key, wanted)) != wanted:
                raise read.fault(f"{key} {value!r} is not supported; want {wanted}")
        hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads", most=4096)
        if hidden % heads:
            raise read.fault(f"{hidden} values over {heads} heads is not a possible attention")
        positions = read.integer("max_position_embeddings")
        first = _padding_token(raw) + 1 if _COUNTS_FROM_PADDING[architecture] else 0
        pooling, normalize = _pooling(folder)
        return cls(
            architecture=architecture,
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.integer("intermediate_size"),
            num_layers=read.integer("num_hidden_layers", most=4096),
            num_heads=heads,
            num_positions=positions,
            first_position=first,
            num_token_types=read.integer("type_vocab_size", default=2),
            layer_norm_eps=read.number("layer_norm_eps", 1e-12),
            max_model_len=min(positions - first, _max_seq_length(folder) or positions),
            pooling=pooling,
            normalize=normalize,
            shorter=_shorter(raw, hidden),
            dtype=read.dtype(),
        )


def read_model_config(folder: Path) -> ModelConfig | EncoderConfig:
    """Return what the model directory `folder` holds: a decoder, which answers, or an encoder, which embeds.

    Raises:
        ModelError: neither that this engine serves.
    """
    architecture = ConfigReader(read_json(folder / "config.json"), folder / "config.json").architecture()
    return (EncoderConfig if architecture in _COUNTS_FROM_PADDING else ModelConfig).from_dir(folder)


def _padding_token(raw: dict[str, Any]) -> int:
    value = raw.get("pad_token_id")
    return value if isinstance(value, int) else 1


def _max_seq_length(folder: Path) -> int | None:
    """How much of a text sentence-transformers would take; what is longer is refused here, and never cut."""
    path = folder / "sentence_bert_config.json"
    if not path.exists():
        return None
    settings = read_json(path)
    if settings.get("do_lower_case"):
        raise ModelError(f"{path}: do_lower_case is not supported")
    return ConfigReader(settings, path).integer("max_seq_length") if settings.get("max_seq_length") else None


def _pooling(folder: Path) -> tuple[Pooling, bool]:
    """How hidden states become a vector, and whether it is then normalized; as sentence-transformers, without a word
    about it the mean."""
    path = folder / "modules.json"
    if not path.exists():
        return "mean", False
    kinds = {}
    for module in _read_list(path):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _MODULES:
            raise ModelError(f"{path}: the module {kind!r} is not supported; there are {', '.join(_MODULES)}")
        kinds[kind] = str(module.get("path", ""))
    if not re.fullmatch(r"\w+", kinds.get("Pooling", "")):
        raise ModelError(f"{path}: names no folder for Pooling")
    settings = read_json(folder / kinds["Pooling"] / "config.json")
    modes = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _POOLING_FLAGS:
        raise ModelError(f"{path}: pooling by {modes} is not supported; want one of {', '.join(_POOLING_FLAGS)}")
    return _POOLING_FLAGS[modes[0]], "Normalize" in kinds


def _read_list(path: Path) -> list[dict[str, Any]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size < 1 << 20 else None
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelError(f"{path}: cannot be read as JSON: {exc}") from None
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ModelError(f"{path}: want a list of JSON objects")
    return value


def _shorter(raw: dict[str, Any], hidden: int) -> tuple[int, ...]:
    """Of a model trained so that the first numbers of a vector are worth most, the lengths it was trained for."""
    given = raw.get("matryoshka_dimensions")
    if not isinstance(given, list):
        return ()
    return tuple(sorted(each for each in given if isinstance(each, int) and 0 < each < hidden))
