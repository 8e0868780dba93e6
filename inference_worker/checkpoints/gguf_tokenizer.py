"""The tokenizer of a GGUF file as tokenizer.json, tokenizer_config.json and chat_template.jinja."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from inference_worker.checkpoints import tokenizer_convert
from inference_worker.checkpoints.gguf_fields import Fields
from inference_worker.checkpoints.gguf_header import GGUFError
from inference_worker.checkpoints.sentencepiece_file import BPE, UNIGRAM, PieceType, SentencePieceFile, VocabularyEntry

# Rules by which a text is split before merging, by their names in GGUF files. None: GPT-2's pattern.
_GPT2, _DIGITS = None, "digits"
_SPLITS: dict[str, str | None] = {
    "codeshell": _DIGITS,
    "command-r": _DIGITS,
    "dbrx": tokenizer_convert.LLAMA3,
    "deepseek-r1-qwen": tokenizer_convert.QWEN,
    "gpt-2": _GPT2,
    "gpt-4o": tokenizer_convert.O200K,
    "llama-bpe": tokenizer_convert.LLAMA3,
    "llama-v3": tokenizer_convert.LLAMA3,
    "llama3": tokenizer_convert.LLAMA3,
    "megrez": tokenizer_convert.QWEN,
    "olmo": _GPT2,
    "qwen2": tokenizer_convert.QWEN,
    "refact": _DIGITS,
    "smaug-bpe": tokenizer_convert.LLAMA3,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": tokenizer_convert.TEKKEN,
}
_NORMALIZED = ("qwen2", "deepseek-r1-qwen")  # to NFC
_WHOLE_WORDS = ("llama-bpe", "llama-v3", "llama3", "tekken", "gpt-4o")  # a word that is a token is not merged
_MODELS = {"llama": BPE, "t5": UNIGRAM}


def write_tokenizer(fields: Fields, directory: Path) -> None:
    """Write the tokenizer's files.

    Raises:
        GGUFError: the tokenizer is not supported, or damaged.
    """
    model = fields.text("tokenizer.ggml.model")
    tokens = fields.items("tokenizer.ggml.tokens", str)
    special = {
        f"{name}_token": tokens[token_id]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if (token_id := fields.token(key)) is not None and 0 <= token_id < len(tokens)
    }
    if model != "gpt2" and model not in _MODELS:
        raise fields.error(f"tokenizer {model!r:.40} is not supported; want gpt2, {' or '.join(_MODELS)}")
    try:
        core = _from_merges(fields, tokens) if model == "gpt2" else _from_pieces(fields, tokens, _MODELS[model])
        _add_frame(core, fields, special, default_bos=model == "llama")
    except GGUFError:
        raise
    except Exception as exc:  # noqa: BLE001 - the tokenizers library raises plain Exception for invalid values
        raise fields.error(f"the tokenizer cannot be converted: {exc}") from None
    core.save(str(directory / "tokenizer.json"))
    # Any other class makes transformers rebuild the pre-tokenizer, and drop its digits stage.
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.size("context_length"),
        **special,
    }
    if template := fields.text("tokenizer.chat_template", ""):
        settings["chat_template"] = template
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _types(fields: Fields, tokens: list[str]) -> list[PieceType]:
    types = fields.items("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens have {len(types)} types")
    return [PieceType(value) for value in types]


def _from_merges(fields: Fields, tokens: list[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer of bytes with merges."""
    name = fields.text("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise ValueError(f"the rule {name!r:.40} is not supported; want one of {', '.join(_SPLITS)}")
    merges = []
    for line in fields.items("tokenizer.ggml.merges", str):
        left, _, right = line.partition(" ")
        merges.append((left, right))
    vocab = {text: token_id for token_id, text in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise ValueError("it has two equal tokens")
    core = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=name in _WHOLE_WORDS))
    split = _SPLITS[name]
    tokenizer_convert.set_byte_level(core, None if split == _DIGITS else split)
    if split == _DIGITS:
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if name in _NORMALIZED:
        core.normalizer = normalizers.NFC()
    added: dict[PieceType, list[AddedToken]] = {PieceType.CONTROL: [], PieceType.USER_DEFINED: []}
    for text, kind in zip(tokens, _types(fields, tokens), strict=True):
        if kind in added:
            added[kind].append(AddedToken(text, normalized=False))
    core.add_special_tokens(added[PieceType.CONTROL])
    core.add_tokens(added[PieceType.USER_DEFINED])
    return core


def _from_pieces(fields: Fields, tokens: list[str], model_type: int) -> tokenizers.Tokenizer:
    """Return a SentencePiece tokenizer."""
    types, scores = _types(fields, tokens), fields.items("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens have {len(scores)} scores")
    charsmap = fields.get("tokenizer.ggml.precompiled_charsmap", list, [])
    file = SentencePieceFile(
        pieces=[VocabularyEntry(*entry) for entry in zip(tokens, scores, types, strict=True)],
        model_type=model_type,
        byte_fallback=PieceType.BYTE in types,
        charsmap=bytes(value & 0xFF for value in charsmap) if model_type == UNIGRAM else b"",
        adds_prefix=fields.get("tokenizer.ggml.add_space_prefix", bool, True),
        removes_spaces=fields.get("tokenizer.ggml.remove_extra_whitespaces", bool, False),
    )
    return tokenizer_convert.from_sentencepiece(file, {}, accepts_unused=True)


def _add_frame(core: tokenizers.Tokenizer, fields: Fields, special: dict[str, str], *, default_bos: bool) -> None:
    """Add the tokens at the beginning and the end of a text."""
    wanted = {
        "bos": fields.get("tokenizer.ggml.add_bos_token", bool, default_bos),
        "eos": fields.get("tokenizer.ggml.add_eos_token", bool, False),
    }
    frame = {
        name: (special[f"{name}_token"], token_id)
        for name, is_added in wanted.items()
        if is_added and f"{name}_token" in special and (token_id := fields.token(name)) is not None
    }
    if frame:
        bos, eos = ([frame[name][0]] if name in frame else [] for name in ("bos", "eos"))
        core.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos], pair=[*bos, "$A", *eos, "$B:1", *eos], special_tokens=list(frame.values())
        )
