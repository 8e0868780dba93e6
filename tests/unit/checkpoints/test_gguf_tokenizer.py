"""Tokenizers in GGUF files give the token ids of the original libraries, on random and multilingual texts."""

from __future__ import annotations

import io
import itertools
import json
import random
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import sentencepiece
import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from inference_worker.checkpoints.gguf_fields import Fields
from inference_worker.checkpoints.gguf_file import GGUFFile
from inference_worker.checkpoints.gguf_header import GGUFError
from inference_worker.checkpoints.gguf_tokenizer import write_tokenizer
from inference_worker.checkpoints.sentencepiece_file import PieceType, SentencePieceFile, parse
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


# The patterns of llama.cpp's rule "default", one after the other.
DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def convert(path: Path, add: Callable[[gguf.GGUFWriter], None], architecture: str = "llama") -> Tokenizer:
    """Return the tokenizer of a GGUF file with the fields that `add` adds."""
    writer = gguf.GGUFWriter(path / "a.gguf", architecture)
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


def train_bytes(path: Path, pattern: str) -> tuple[list[str], list[list[str]], dict[bytes, int]]:
    """Return the tokens, the merges and tiktoken's ranks of a tokenizer of bytes."""
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
    core.save(str(path / "trained.json"))
    return tokens, json.loads((path / "trained.json").read_text())["model"]["merges"], ranks


def add_bytes(writer: gguf.GGUFWriter, tokens: list[str], merges: list[list[str]], *control: str) -> None:
    """Add the fields of a tokenizer of bytes, of which the first control token begins texts."""
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, *control])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(control))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    if control:
        writer.add_bos_token_id(len(tokens))


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        *(("llama-bpe", LLAMA3), ("dbrx", LLAMA3), ("glm4", LLAMA3), ("chatglm-bpe", LLAMA3), ("falcon3", LLAMA3)),
        *(("qwen2", QWEN), ("gpt-4o", O200K), ("tekken", TEKKEN), ("gpt-2", GPT2)),
    ],
)
def test_merges(name: str, pattern: str, tmp_path: Path) -> None:
    tokens, merges, ranks = train_bytes(tmp_path, pattern)
    special = {"<|user|>": len(tokens)}
    original = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

    def add(writer: gguf.GGUFWriter) -> None:
        add_bytes(writer, tokens, merges, *special)
        writer.add_tokenizer_pre(name)
        writer.add_add_bos_token(True)

    converted = convert(tmp_path, add)
    for text in [*TEXTS, "a<|user|>b"]:
        text = unicodedata.normalize("NFC", text) if name == "qwen2" else text
        assert ids(converted, text) == original.encode(text, allowed_special="all"), text
    assert converted.encode("ab").ids == [len(tokens), *original.encode("ab")]


@pytest.mark.parametrize(
    ("architecture", "first_token", "patterns"),
    [
        ("llama", "<s>", DEFAULT),
        ("llama", "<|begin_of_text|>", (LLAMA3,)),
        ("qwen2", "<|im_end|>", (QWEN,)),
        ("qwen3moe", "<|im_end|>", (QWEN,)),
        ("glm4", "<|user|>", (LLAMA3,)),
    ],
)
def test_a_file_without_a_rule(
    architecture: str, first_token: str, patterns: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rule is that of the model, or else llama.cpp's default."""
    tokens, merges, ranks = train_bytes(tmp_path, patterns[-1] if len(patterns) == 1 else GPT2)
    whole = tiktoken.Encoding("test", pat_str="(?s).+", mergeable_ranks=ranks, special_tokens={})
    converted = convert(tmp_path, lambda writer: add_bytes(writer, tokens, merges, first_token), architecture)
    for text in TEXTS:
        text = unicodedata.normalize("NFC", text) if architecture.startswith("qwen") else text
        pieces = [text]
        for pattern in patterns:
            pieces = [part for piece in pieces for part in split(pattern, piece)]
        assert ids(converted, text) == [token for piece in pieces for token in whole.encode(piece)], text
    assert "does not have tokenizer.ggml.pre" in caplog.text
    begins = [len(tokens)] if first_token == "<|begin_of_text|>" else []
    assert converted.encode("ab").ids == [*begins, *ids(converted, "ab")]


def split(pattern: str, text: str) -> list[str]:
    """Return the matches and the texts between them."""
    edges = sorted({0, len(text), *(edge for match in regex.finditer(pattern, text) for edge in match.span())})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


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
    original, file = train_pieces(**options)

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


def train_pieces(**options: Any) -> tuple[sentencepiece.SentencePieceProcessor, SentencePieceFile]:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3), model_writer=out, vocab_size=420, character_coverage=0.99,
        hard_vocab_limit=False, minloglevel=2, num_threads=1, **options,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue()), parse(out.getvalue())


def add_pieces(writer: gguf.GGUFWriter, file: SentencePieceFile, types: list[int], model: str = "llama") -> None:
    """Add the fields of a SentencePiece tokenizer. As in published files, user-defined tokens have spaces."""
    texts = [
        piece.text.replace("▁", " ") if piece.type is PieceType.USER_DEFINED else piece.text for piece in file.pieces
    ]
    writer.add_tokenizer_model(model)
    writer.add_token_list(texts)
    writer.add_token_scores([piece.score for piece in file.pieces])
    writer.add_token_types(types)
    writer.add_add_space_prefix(file.adds_prefix)
    writer.add_remove_extra_whitespaces(file.removes_spaces)


UNKNOWN_MARKS: dict[str, Callable[[gguf.GGUFWriter, list[int], int], object]] = {
    "a control token with its id": lambda w, types, i: (types.__setitem__(i, 3), w.add_unk_token_id(i)),
    "a control token with its name": lambda _, types, i: types.__setitem__(i, 3),
    "one of two": lambda w, types, i: (types.__setitem__(-1, 2), w.add_unk_token_id(i)),
}


@pytest.mark.parametrize("mark", UNKNOWN_MARKS)
def test_the_unknown_token_of_gemma_3(mark: str, tmp_path: Path) -> None:
    """Its files mark the unknown token as a control token, and their tokens of several spaces have spaces."""
    own = ["▁▁", "▁▁▁▁", "\n\n", "<tool>"]
    original, file = train_pieces(model_type="bpe", **IDENTITY, add_dummy_prefix=False, user_defined_symbols=own)
    assert {piece.text for piece in file.pieces if piece.type is PieceType.USER_DEFINED} == set(own)

    def add(writer: gguf.GGUFWriter) -> None:
        types = [int(piece.type) for piece in file.pieces]
        UNKNOWN_MARKS[mark](writer, types, original.unk_id())
        add_pieces(writer, file, types)

    converted = convert(tmp_path, add)
    for text in [*TEXTS, "a <tool> b<tool>c", "x     y", "a\n\n\nb\n\n  c"]:
        assert ids(converted, text) == original.encode(text), text
        assert converted.decode(ids(converted, text)) == original.decode(original.encode(text))


def test_tokens_that_were_added_to_a_model_with_a_first_space(tmp_path: Path) -> None:
    """As in llama.cpp, a text after such a token begins with a space, too."""
    original, file = train_pieces(model_type="bpe", **IDENTITY)
    file.pieces[-1] = replace(file.pieces[-1], text="<|turn|>", type=PieceType.USER_DEFINED)
    converted = convert(tmp_path, lambda w: add_pieces(w, file, [int(piece.type) for piece in file.pieces]))
    turn = len(file.pieces) - 1
    wanted = [*original.encode("a "), turn, *original.encode(" the"), turn, turn, *original.encode("de")]
    assert ids(converted, "a <|turn|> the<|turn|><|turn|>de") == wanted


@pytest.mark.parametrize(
    ("model", "rule", "keys", "begins", "ends"),
    [
        ("llama", None, {}, True, False),
        ("llama", None, {"add_bos_token": False, "add_eos_token": True}, False, True),
        ("t5", None, {}, False, True),
        ("t5", None, {"add_bos_token": True, "add_eos_token": False}, True, False),
        ("gpt2", "gpt-2", {}, False, False),
        ("gpt2", "gpt-2", {"add_bos_token": True}, True, False),
        ("gpt2", "qwen2", {}, False, False),
        ("gpt2", "glm4", {}, False, False),
        ("gpt2", "llama-bpe", {}, True, False),
        ("gpt2", "llama-bpe", {"add_bos_token": False}, False, False),
        ("gpt2", "tekken", {}, True, False),
    ],
)
def test_the_first_and_last_token(
    model: str, rule: str | None, keys: dict[str, bool], begins: bool, ends: bool, tmp_path: Path
) -> None:
    """Files without the keys have the defaults of llama.cpp for the tokenizer."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a"] if rule is None else ["a", "<s>", "</s>", "b", "ab"]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(model)
        if rule is None:
            writer.add_token_scores([-float(number) for number in range(len(tokens))])
        else:
            writer.add_tokenizer_pre(rule)
            writer.add_token_merges(["a b"])
        writer.add_token_list(tokens)
        writer.add_token_types([{"<unk>": 2, "<s>": 3, "</s>": 3}.get(token, 1) for token in tokens])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for key, value in keys.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)

    converted = convert(tmp_path, add)
    assert converted.encode("a").ids == [*([1] if begins else []), *ids(converted, "a"), *([2] if ends else [])]


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda w: w.add_tokenizer_model("rwkv"), "tokenizer 'rwkv' is not supported"),
        (lambda w: (w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("x")), "rule 'x' is not supported"),
        (lambda w: (w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("gpt-2")), "merges is None"),
        (
            lambda w: (w.add_tokenizer_model("llama"), w.add_token_types([1, 1]), w.add_token_scores([0.0, 0.0])),
            "it has 0 unknown tokens",
        ),
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
