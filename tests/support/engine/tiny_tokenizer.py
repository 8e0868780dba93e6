"""Small tokenizers, written to a directory: of bytes without merges, and of pieces as SentencePiece has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

EOS = "<|eos|>"


def write_tokenizer(directory: Path, marks: Sequence[str], chat_template: str | None = None) -> None:
    """Write a tokenizer with one token for each byte and each mark. Every second mark is a special token."""
    vocab = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([EOS])
    for number, mark in enumerate(marks):
        core.add_tokens([tokenizers.AddedToken(mark, special=bool(number % 2), normalized=False)])
    core.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": EOS, "model_max_length": 512}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def write_pieces(directory: Path, *, adds_prefix: bool = True) -> None:
    """Write a tokenizer whose text is not the concatenation of its tokens' bytes: spaces are marks, bytes are tokens.

    Args:
        adds_prefix: adds a space before a text, which decoding removes, as in Llama 2. Gemma's does not.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "▁a", "▁b", "ab"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    core = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    core.add_special_tokens(pieces[:3])
    steps = [normalizers.Prepend("▁")] if adds_prefix else []
    core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if adds_prefix else []
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", vocab["<s>"])]
    )
    core.save(str(directory / "tokenizer.json"))
