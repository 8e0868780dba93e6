"""Configurations of encoders: embedding models with their pooling, and cross-encoders, which score pairs of texts.

Does not import torch: the gateway reads a model's limits with this module.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from inference_worker.checkpoints.decoder_config import FAMILIES, read_decoder_directory
from inference_worker.checkpoints.model_config import ConfigReader, ModelConfig, ModelError, read_json
from inference_worker.checkpoints.pair_scoring import PairScoring, read_pair_scoring
from inference_worker.contract.settings import EMBEDDED, EMBEDDED_ENCODER

ModelTask = Literal["generate", "embed", "rerank"]
Family = Literal["bert", "roberta", "modernbert", "decoder"]
Pooling = Literal["mean", "cls", "last"]
_POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
MAX_PROMPT_CHARACTERS = 1000
_MODULES = ("Transformer", "Pooling", "Normalize", "LogitScore")
_ACTIVATIONS = {"Sigmoid": True, "Identity": False}  # whether it is the sigmoid


class _Architecture(NamedTuple):
    family: Family
    prefix: str  # beginning of the names of the encoder's weights
    is_cross_encoder: bool


ENCODER_ARCHITECTURES = {
    "BertModel": _Architecture("bert", "", False),
    "RobertaModel": _Architecture("roberta", "", False),
    "XLMRobertaModel": _Architecture("roberta", "", False),
    "ModernBertModel": _Architecture("modernbert", "", False),
    "BertForSequenceClassification": _Architecture("bert", "bert.", True),
    "RobertaForSequenceClassification": _Architecture("roberta", "roberta.", True),
    "XLMRobertaForSequenceClassification": _Architecture("roberta", "roberta.", True),
    "ModernBertForSequenceClassification": _Architecture("modernbert", "model.", True),
}


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The shape of an encoder, from a Hugging Face directory with or without the files of sentence-transformers."""

    architecture: str
    family: Family
    prefix: str  # beginning of the names of the encoder's weights
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    layer_norm_eps: float
    max_model_len: int  # tokens of one input
    pooling: Pooling
    normalize: bool  # vectors have length 1
    shorter: tuple[int, ...]  # lengths to which vectors may be truncated
    is_cross_encoder: bool  # it scores pairs of texts
    sigmoid: bool  # a cross-encoder's scores are the sigmoid of its output
    dtype: str  # dtype of the checkpoint: "bfloat16", "float16" or "float32"
    prompt: str = ""  # precedes every text of an embedding request; for a decoder that scores pairs, its instruction
    # BERT and RoBERTa
    num_positions: int = 0  # rows of the position table
    first_position: int = 0  # position of the first token
    num_token_types: int = 1
    # ModernBERT
    windows: tuple[int, ...] = ()  # places before and after a token that each layer attends to; 0: all
    rope_thetas: tuple[float, ...] = ()  # base of the rotary frequencies in each layer
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    decoder: ModelConfig | None = None  # shape of a decoder that is an embedding model or a cross-encoder
    pair_scoring: PairScoring | None = None  # tokens and template of a decoder that is a cross-encoder

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
        if architecture not in ENCODER_ARCHITECTURES:
            return cls._of_decoder(directory, raw)
        family, prefix, is_cross_encoder = ENCODER_ARCHITECTURES[architecture]
        activation = "hidden_activation" if family == "modernbert" else "hidden_act"
        for key, expected in ((activation, "gelu"), ("position_embedding_type", "absolute")):
            if (value := raw.get(key, expected)) != expected:
                raise read.error(f"{key} {value!r} is not supported; want {expected}")
        if "quantization_config" in raw:
            raise read.error("quantized checkpoints are not supported")
        hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads", maximum=4096)
        if hidden % heads:
            raise read.error(f"{hidden} values do not divide into {heads} heads")
        layers = read.integer("num_hidden_layers", maximum=4096)
        if family == "modernbert":
            max_model_len, own = _modernbert(raw, read, layers)
        else:
            max_model_len, own = _bert(raw, read, family)
        if is_cross_encoder:
            pooling, normalize, sigmoid = _classifier(raw, read, family)
        else:
            (pooling, normalize), sigmoid = _pooling(directory), False
        prompt = _default_prompt(directory)
        if prompt and is_cross_encoder:
            raise read.error("a default prompt is not supported for cross-encoders")
        return cls(
            architecture=architecture,
            family=family,
            prefix=prefix,
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            max_model_len=min(max_model_len, _max_seq_length(directory) or max_model_len),
            pooling=pooling,
            normalize=normalize,
            shorter=() if is_cross_encoder else _shorter_dimensions(raw, hidden),
            is_cross_encoder=is_cross_encoder,
            sigmoid=sigmoid,
            dtype=read.dtype(),
            prompt=prompt,
            **own,
        )

    @classmethod
    def _of_decoder(cls, directory: Path, raw: dict[str, Any]) -> EncoderConfig:
        """Read a decoder with the files of sentence-transformers, or that scores pairs."""
        decoder = read_decoder_directory(directory)
        if decoder.checkpoint_format is not None:
            raise ModelError(f"{directory / 'config.json'}: quantized embedding models are not supported")
        scoring = read_pair_scoring(directory, raw, _modules(directory))
        pooling: Pooling = "last"
        normalize = False
        if scoring is None:
            pooling, normalize = _pooling(directory)
        return cls(
            architecture=decoder.architecture,
            family="decoder",
            prefix="",
            vocab_size=decoder.vocab_size,
            hidden_size=decoder.hidden_size,
            intermediate_size=decoder.intermediate_size,
            num_layers=decoder.num_layers,
            num_heads=decoder.num_heads,
            layer_norm_eps=decoder.rms_norm_eps,
            max_model_len=min(decoder.max_model_len, _max_seq_length(directory) or decoder.max_model_len),
            pooling=pooling,
            normalize=normalize,
            shorter=() if scoring else _shorter_dimensions(raw, decoder.hidden_size),
            is_cross_encoder=scoring is not None,
            sigmoid=scoring is not None and _is_sigmoid(_settings(directory), directory),
            dtype=decoder.dtype,
            prompt=_default_prompt(directory),
            decoder=decoder,
            pair_scoring=scoring,
        )


def read_model_config(directory: Path) -> ModelConfig | EncoderConfig:
    """Read the configuration in the model directory: a decoder, which generates text, or an encoder.

    A decoder with the files of sentence-transformers is an encoder: its hidden states are pooled. So is a decoder that
    scores pairs.

    Raises:
        ModelError: the engine does not support the model.
    """
    raw = read_json(directory / "config.json")
    architecture = ConfigReader(raw, directory / "config.json").architecture()
    is_encoder = architecture in ENCODER_ARCHITECTURES or (directory / "modules.json").exists()
    is_encoder = is_encoder or read_pair_scoring(directory, raw, {}) is not None
    return EncoderConfig.from_dir(directory) if is_encoder else read_decoder_directory(directory)


def supported_architectures() -> frozenset[str]:
    """Return the names in config.json of the architectures that the engine supports."""
    return frozenset(FAMILIES.keys() | ENCODER_ARCHITECTURES.keys())


def model_task(source: str) -> ModelTask:
    """Return the task of a model of MILLRACE_MODELS by its source. A source that cannot be read counts as a generator.

    The files are read once a process.
    """
    if source in EMBEDDED:
        return "embed" if source == EMBEDDED_ENCODER else "generate"
    try:
        return _directory_task(Path(source).expanduser())
    except (OSError, RuntimeError):  # RuntimeError: a home directory of an unknown user
        return "generate"


@cache
def _directory_task(directory: Path) -> ModelTask:
    try:
        config = read_model_config(directory) if directory.is_dir() else None
    except ModelError:
        return "generate"
    if not isinstance(config, EncoderConfig):
        return "generate"
    return "rerank" if config.is_cross_encoder else "embed"


def _bert(raw: dict[str, Any], read: ConfigReader, family: Family) -> tuple[int, dict[str, Any]]:
    """Return the maximum input length and the family's own fields. RoBERTa counts positions from the padding token's
    id + 1."""
    positions = read.integer("max_position_embeddings")
    first = _padding_token(raw) + 1 if family == "roberta" else 0
    if first >= positions:
        raise read.error(f"max_position_embeddings is {positions}; want more than pad_token_id + 1, {first}")
    return positions - first, {
        "num_positions": positions,
        "first_position": first,
        "num_token_types": read.integer("type_vocab_size", default=2),
        "layer_norm_eps": read.number("layer_norm_eps", 1e-12),
    }


def _modernbert(raw: dict[str, Any], read: ConfigReader, layers: int) -> tuple[int, dict[str, Any]]:
    """Return the maximum input length and the family's own fields."""
    if (value := raw.get("classifier_activation", "gelu")) != "gelu":
        raise read.error(f"classifier_activation {value!r} is not supported; want gelu")
    every = read.integer("global_attn_every_n_layers", default=3)
    kinds = raw.get("layer_types") or ["sliding_attention" if n % every else "full_attention" for n in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or {*map(str, kinds)} - set(_DEFAULT_THETAS):
        raise read.error(f"layer_types must name one of {', '.join(_DEFAULT_THETAS)} for each of {layers} layers")
    thetas = {kind: _theta(raw, read, kind) for kind in _DEFAULT_THETAS}
    window = read.integer("local_attention", default=128) // 2
    if window < 1:
        raise read.error("local_attention must be at least 2")
    flags = {name: read.flag(name, False) for name in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")}
    return read.integer("max_position_embeddings"), flags | {
        "windows": tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        "rope_thetas": tuple(thetas[kind] for kind in kinds),
        "layer_norm_eps": read.number("norm_eps", 1e-5),
    }


_DEFAULT_THETAS = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 1e4)}


def _theta(raw: dict[str, Any], read: ConfigReader, kind: str) -> float:
    """Return the rotary base of a type of layers. Newer files have rope_parameters, older ones a key for each type."""
    key, default = _DEFAULT_THETAS[kind]
    parameters = raw.get("rope_parameters") or {}
    own = (parameters.get(kind) if isinstance(parameters, dict) else parameters) or {}
    if raw.get("rope_scaling") or not isinstance(own, dict) or own.get("rope_type", "default") != "default":
        raise read.error("scaled rotary embeddings are not supported for encoders")
    if key == "local_rope_theta" and raw.get(key, default) is None:
        return _theta(raw, read, "full_attention")
    return ConfigReader({"rope_theta": raw.get(key) or default, **own}, read.path).number("rope_theta", default)


def _classifier(raw: dict[str, Any], read: ConfigReader, family: Family) -> tuple[Pooling, bool, bool]:
    """Return a cross-encoder's pooling, False, and whether its scores are the sigmoid of its output.

    As in sentence-transformers, the default for one label is the sigmoid.
    """
    labels = raw.get("id2label")
    count = len(labels) if isinstance(labels, dict) else raw.get("num_labels", 2)
    if count != 1:
        raise read.error(f"a classifier with {count} labels is not supported; want a cross-encoder with one label")
    pooling: Pooling = "cls"
    if family == "modernbert" and (value := raw.get("classifier_pooling", "cls")) != "cls":
        if value != "mean":
            raise read.error(f"classifier_pooling {value!r} is not supported; want cls or mean")
        pooling = "mean"
    settings = raw.get("sentence_transformers")
    name = settings.get("activation_fn") if isinstance(settings, dict) else None
    name = name or raw.get("sbert_ce_default_activation_function")
    return pooling, False, _is_sigmoid({"activation_fn": name}, read.path)


def _is_sigmoid(settings: dict[str, Any], path: Path) -> bool:
    """Return whether the activation is the sigmoid, which is the default for one label."""
    name = str(settings.get("activation_fn") or "Sigmoid")
    if (activation := name.rpartition(".")[2]) not in _ACTIVATIONS:
        raise ModelError(f"{path}: the activation {name!r} is not supported; want {' or '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


def _padding_token(raw: dict[str, Any]) -> int:
    value = raw.get("pad_token_id")
    return value if isinstance(value, int) and value >= 0 else 1


def _max_seq_length(directory: Path) -> int | None:
    """Return the maximum input length of sentence-transformers. Longer inputs are rejected, never truncated."""
    path = directory / "sentence_bert_config.json"
    if not path.exists():
        return None
    settings = read_json(path)
    if settings.get("do_lower_case"):
        raise ModelError(f"{path}: do_lower_case is not supported")
    return ConfigReader(settings, path).integer("max_seq_length") if settings.get("max_seq_length") else None


def _modules(directory: Path) -> dict[str, str]:
    """Return the directories of the modules of sentence-transformers by their types; none without modules.json."""
    path = directory / "modules.json"
    found = {}
    for module in _read_list(path) if path.exists() else ():
        module_type = str(module.get("type", "")).rpartition(".")[2]
        if module_type not in _MODULES:
            raise ModelError(f"{path}: the module {module_type!r} is not supported; want one of {', '.join(_MODULES)}")
        found[module_type] = str(module.get("path", ""))
    for module_type in ("Pooling", "LogitScore"):
        if module_type in found and not re.fullmatch(r"\w+", found[module_type]):
            raise ModelError(f"{path}: names no directory for {module_type}")
    return found


def _pooling(directory: Path) -> tuple[Pooling, bool]:
    """Return the pooling, and whether vectors are normalized. As in sentence-transformers, the default is the mean."""
    path, module_paths = directory / "modules.json", _modules(directory)
    if not path.exists():
        return "mean", False
    if "Pooling" not in module_paths:
        raise ModelError(f"{path}: names no directory for Pooling")
    settings = read_json(directory / module_paths["Pooling"] / "config.json")
    if settings.get("include_prompt") is False:
        raise ModelError(f"{path}: pooling without the prompt (include_prompt) is not supported")
    modes = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _POOLING_FLAGS:
        raise ModelError(f"{path}: pooling by {modes} is not supported; want one of {', '.join(_POOLING_FLAGS)}")
    return _POOLING_FLAGS[modes[0]], "Normalize" in module_paths


def _default_prompt(directory: Path) -> str:
    """Return the prompt that sentence-transformers adds to a text if none is named; empty: none."""
    path, settings = directory / _SETTINGS, _settings(directory)
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts")
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(prompt, str) or len(prompt) > MAX_PROMPT_CHARACTERS:
        raise ModelError(f"{path}: prompts has no text of up to {MAX_PROMPT_CHARACTERS} characters for {name!r}")
    return prompt


_SETTINGS = "config_sentence_transformers.json"


def _settings(directory: Path) -> dict[str, Any]:
    """Return the settings of sentence-transformers; none without their file."""
    path = directory / _SETTINGS
    return read_json(path) if path.exists() else {}


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
