"""Tokenizers in GGUF files give the token ids of the original libraries, on random and multilingual texts."""

from __future__ import annotations

import io
import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from inference_worker.checkpoints.gguf_fields import Fields
from inference_worker.checkpoints.gguf_file import GGUFFile
from inference_worker.checkpoints.gguf_header import GGUFError
from inference_worker.checkpoints.gguf_tokenizer import write_tokenizer
from inference_worker.checkpoints.sentencepiece_file import parse
from inference_worker.checkpoints.tokenizer import byte_alphabet
from inference_worker.checkpoints.tokenizer_convert import LLAMA3, O200K, QWEN

_RANDOM = random.Random(0)
TEXTS = [
    "The reset button is on the back. Press it for five seconds, then wait.",
    "Il était une fois, dans une forêt très éloignée, un petit renard.",
    "Привет, мир! Как дела? Съешь ещё этих мягких французских булок.",
    "日本語のテキストです。漢字とかなが混ざっています。",
    "def main():\n\tprint('it''s', 12345, x  == 0)  \r\n\r\n",
    *("", " ", "  two  spaces  ", "x" * 60, "IT'S don'T", "▁literal", "cafe\u0301 ﬁne"),
    *("".join(_RANDOM.choices("aabcdeefgst  \n\t'.,!?AB01éßж日🎉/", k=_RANDOM.randrange(1, 60))) for _ in range(300)),
]
# As Mistral's tekken.json states it.
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}


def convert(path: Path, add: Callable[[gguf.GGUFWriter], None]) -> Tokenizer:
    """Return the tokenizer of a GGUF file with the fields that `add` adds."""
    writer = gguf.GGUFWriter(path / "a.gguf", "llama")
    writer.add_context_length(512)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path / "a.gguf") as file:
        write_tokenizer(Fields(file), path)
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def ids(core: Tokenizer, text: str) -> list[int]:
    return list(core.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("llama-bpe", LLAMA3), ("dbrx", LLAMA3), ("qwen2", QWEN), ("gpt-4o", O200K), ("tekken", TEKKEN), ("gpt-2", GPT2)],
)
def test_merges(name: str, pattern: str, tmp_path: Path) -> None:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(TEXTS * 3, trainer)
    tokens = sorted(core.get_vocab(), key=core.get_vocab().__getitem__)
    letters = byte_alphabet()
    ranks = {bytes(letters[letter] for letter in token): rank for rank, token in enumerate(tokens)}
    special = {"<|user|>": len(tokens)}
    original = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    core.save(str(tmp_path / "trained.json"))
    merges = json.loads((tmp_path / "trained.json").read_text())["model"]["merges"]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_list([*tokens, "<|user|>"])
        writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL])
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_bos_token_id(len(tokens))
        writer.add_add_bos_token(True)

    converted = convert(tmp_path, add)
    for text in [*TEXTS, "a<|user|>b"]:
        text = unicodedata.normalize("NFC", text) if name == "qwen2" else text
        assert ids(converted, text) == original.encode(text, allowed_special="all"), text
    assert converted.encode("ab").ids == [len(tokens), *original.encode("ab")]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"model_type": "bpe", **IDENTITY}, id="as llama 2"),
        pytest.param(
            {"model_type": "bpe", **IDENTITY, "add_dummy_prefix": False, "user_defined_symbols": ["<tool>"]},
            id="as gemma",
        ),
        pytest.param({"model_type": "unigram"}, id="unigram"),
    ],
)
def test_sentencepiece(options: dict[str, Any], tmp_path: Path) -> None:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3), model_writer=out, vocab_size=400, character_coverage=0.99,
        hard_vocab_limit=False, minloglevel=2, num_threads=1, **options,
    )  # fmt: skip
    original = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    file = parse(out.getvalue())

    def add(writer: gguf.GGUFWriter) -> None:
        padding = [f"[PAD{number}]" for number in range(4)]  # as in files whose vocabulary is smaller than the model's
        writer.add_tokenizer_model("t5" if options["model_type"] == "unigram" else "llama")
        writer.add_token_list([*(piece.text for piece in file.pieces), *padding])
        writer.add_token_scores([*(piece.score for piece in file.pieces), *(-1000.0 for _ in padding)])
        writer.add_token_types([*(int(piece.type) for piece in file.pieces), *(gguf.TokenType.UNUSED for _ in padding)])
        writer.add_add_space_prefix(file.adds_prefix)
        writer.add_remove_extra_whitespaces(file.removes_spaces)
        writer.add_bos_token_id(original.bos_id())
        if file.charsmap:
            writer.add_precompiled_charsmap(file.charsmap)

    converted = convert(tmp_path, add)
    for text in [*TEXTS, "a <tool> b<tool>c"]:
        assert ids(converted, text) == original.encode(text), text
    bos = [] if options["model_type"] == "unigram" else [original.bos_id()]
    assert converted.encode("a").ids == [*bos, *original.encode("a")]


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda w: w.add_tokenizer_model("rwkv"), "tokenizer 'rwkv' is not supported"),
        (lambda w: (w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("x")), "rule 'x' is not supported"),
        (lambda w: (w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("gpt-2")), "merges is None"),
        (
            lambda w: (w.add_tokenizer_model("llama"), w.add_token_types([1]), w.add_token_scores([0.0])),
            "2 tokens have 1 types",
        ),
        (
            lambda w: (w.add_tokenizer_model("llama"), w.add_token_types([1, 99]), w.add_token_scores([0.0, 0.0])),
            "99 is not a valid PieceType",
        ),
    ],
)
def test_an_error_names_an_invalid_tokenizer(
    add: Callable[[gguf.GGUFWriter], object], message: str, tmp_path: Path
) -> None:
    def add_all(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a", "b"])
        add(writer)

    with pytest.raises(GGUFError, match=message):
        convert(tmp_path, add_all)
