"""Conversion of a GGUF file of the Llama architecture to a Hugging Face directory.

Increment `CONVERTER_VERSION` in model_source.py when the output changes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inference_worker.models.gguf_file import GGUFFile, GGUFTensor
from inference_worker.models.gguf_header import GGUFError

_CONTROL, _USER_DEFINED = 3, 4  # token types
_ROW_BATCH_SIZE = 4096

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_DIGITS = {"type": "Digits", "individual_digits": True}
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


# Pre-tokenizers by their GGUF names.
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [_DIGITS, _byte_level(True)],
    "gpt-2": [_byte_level(True)],
    "llama-bpe": [
        {"type": "Split", "pattern": {"Regex": _LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False},
        _byte_level(False),
    ],
}


def convert(file: GGUFFile, directory: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Write `file` to the empty `directory` as config.json, tokenizer files and model.safetensors in bfloat16.

    Raises:
        GGUFError: the architecture or tokenizer is not supported, or a tensor is missing or has a wrong shape.
    """
    write_settings(file, directory)
    _write_weights(file, _Fields(file), directory / "model.safetensors", progress)


def write_settings(file: GGUFFile, directory: Path) -> None:
    """Write config.json and the tokenizer files to the empty `directory`.

    Raises:
        GGUFError: the architecture or tokenizer is not supported, or a tensor is not part of such a model.
    """
    fields = _Fields(file)
    if (architecture := fields.text("general.architecture")) != "llama":
        raise GGUFError(f"{file.path}: architecture {architecture!r} is not supported; want llama")
    for tensor in file.tensors.values():
        _target_name(file, tensor)
    _write_json(directory / "config.json", _config(file, fields))
    generation = {key: fields.token(key) for key in ("bos", "eos", "padding")}
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": generation["bos"], "eos_token_id": generation["eos"], "pad_token_id": generation["padding"]},
    )
    _write_tokenizer(fields, directory)


class _Fields:
    """The file's metadata, with checks of the values' types."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def get(self, key: str, value_type: type | tuple[type, ...], default: Any = None) -> Any:
        value = self._file.fields.get(key, default)
        if not isinstance(value, value_type):
            raise GGUFError(f"{self._file.path}: {key} is {value!r:.80}, which is not supported")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        return str(self.get(key, str, default))

    def size(self, key: str, default: int | None = None) -> int:
        return int(self.get(f"llama.{key}", int, default))

    def number(self, key: str, default: float) -> float:
        # The value is a float32, so 1e-05 reads as 9.9999997e-06. Seven digits restore it.
        return float(f"{float(self.get(f'llama.{key}', (int, float), default)):.7g}")

    def token(self, name: str) -> int | None:
        value = self._file.fields.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None

    def strings(self, key: str) -> list[str]:
        value: list[str] = self.get(key, list)
        if not all(isinstance(item, str) for item in value):
            raise GGUFError(f"{self._file.path}: {key} is not a list of strings")
        return value


def _config(file: GGUFFile, fields: _Fields) -> dict[str, Any]:
    hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields.token("bos"),
        "eos_token_id": fields.token("eos"),
        "pad_token_id": fields.token("padding"),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "head_dim": fields.size("attention.key_length", hidden // max(heads, 1)),
        "intermediate_size": fields.size("feed_forward_length"),
        "max_position_embeddings": fields.size("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": fields.size("block_count"),
        "num_key_value_heads": fields.size("attention.head_count_kv", heads),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(file, fields),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16",
        "vocab_size": len(fields.strings("tokenizer.ggml.tokens")),
    }


def _rope_scaling(file: GGUFFile, fields: _Fields) -> dict[str, Any] | None:
    scaling_type = fields.text("llama.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        raise GGUFError(f"{file.path}: per-frequency rotary factors are not supported; use this model's safetensors")
    if scaling_type == "none":
        return None
    if scaling_type == "linear":
        return {"rope_type": "linear", "factor": fields.number("rope.scaling.factor", 1.0)}
    raise GGUFError(f"{file.path}: rope scaling {scaling_type!r} is not supported")


def _write_tokenizer(fields: _Fields, directory: Path) -> None:
    model, pre = fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise GGUFError(f"tokenizer {model}/{pre} is not supported; want gpt2 with one of {known}")
    tokens = fields.strings("tokenizer.ggml.tokens")
    token_types = fields.get("tokenizer.ggml.token_type", list)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": text, **plain, "special": token_type == _CONTROL}
        for i, (text, token_type) in enumerate(zip(tokens, token_types, strict=True))
        if token_type in (_CONTROL, _USER_DEFINED)
    ]
    special = {
        f"{name}_token": tokens[token_id]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if (token_id := fields.token(key)) is not None and 0 <= token_id < len(tokens)
    }
    _write_json(
        directory / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
            "post_processor": _post_processor(fields, special),
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": pre == "llama-bpe",
                "vocab": {text: i for i, text in enumerate(tokens)},
                "merges": fields.strings("tokenizer.ggml.merges"),
            },
        },
    )
    # Any other class makes transformers rebuild the pre-tokenizer, and drop its digits stage.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    settings["model_max_length"] = fields.size("context_length")
    if template := fields.text("tokenizer.chat_template", ""):
        settings["chat_template"] = template
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(directory / "tokenizer_config.json", settings)


def _post_processor(fields: _Fields, special: dict[str, str]) -> dict[str, Any] | None:
    if not fields.get("tokenizer.ggml.add_bos_token", bool, False) or "bos_token" not in special:
        return None
    bos = special["bos_token"]
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [fields.token("bos")], "tokens": [bos]}},
    }


def _write_weights(file: GGUFFile, fields: _Fields, path: Path, progress: Callable[[int, int], None] | None) -> None:
    """Write the safetensors file in groups of rows, so that memory use does not depend on the model's size."""
    names = {_target_name(file, tensor): tensor for tensor in file.tensors.values()}
    total = sum(2 * math.prod(tensor.shape) for tensor in names.values())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in names.items():
        size = 2 * math.prod(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    heads = fields.size("attention.head_count")
    permuted = {"attn_q": heads, "attn_k": fields.size("attention.head_count_kv", heads)}
    done = 0
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in names.values():
            part = tensor.name.split(".")[-2]
            rows = tensor.shape[0] if part in permuted else _ROW_BATCH_SIZE
            for values in file.rows(tensor, rows):
                block = _unpermute(values, permuted[part]) if part in permuted else values
                out.write(to_bfloat16(block).tobytes())
                done += 2 * block.size
                if progress is not None:
                    progress(done, total)


def _target_name(file: GGUFFile, tensor: GGUFTensor) -> str:
    if tensor.name in _TOP:
        return _TOP[tensor.name]
    parts = tensor.name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[3] == "weight" and parts[2] in _PARTS:
        return f"model.layers.{int(parts[1])}.{_PARTS[parts[2]]}.weight"
    raise GGUFError(f"{file.path}: tensor {tensor.name} is not part of a Llama model")


def _unpermute(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Convert the row order of queries and keys from GGUF's rotation by pairs to rotation by halves."""
    count, columns = rows.shape
    if count % (2 * heads):
        raise GGUFError(f"{count} rows do not divide into {heads} heads")
    return rows.reshape(heads, count // heads // 2, 2, columns).swapaxes(1, 2).reshape(count, columns)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of `values` in bfloat16, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
