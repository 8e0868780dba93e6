"""Converted tokenizers give the token ids of the original libraries, on random and multilingual texts."""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from inference_worker.checkpoints import sentencepiece_file, tokenizer_convert
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.checkpoints.tokenizer import Tokenizer as ModelTokenizer
from inference_worker.checkpoints.tokenizer import byte_alphabet
from inference_worker.checkpoints.tokenizer_convert import LLAMA3, O200K, QWEN, convert, find_source
from inference_worker.contract.settings import ModelSpec
from tests.support.engine.tiny_models import make_cross_encoder

LETTERS = "aabcdeefgst  \n\t'.,!?AB01éßдж日本語🎉\r/\u0301"
# tiktoken 0.14 (MIT license) states the pattern of cl100k_base in this form.
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}


@cache
def texts() -> list[str]:
    numbers = random.Random(0)
    found = [
        "The reset button is on the back. Press it for five seconds, then wait.",
        "Il était une fois, dans une forêt très éloignée, un petit renard.",
        "Привет, мир! Как дела? Съешь ещё этих мягких французских булок.",
        "日本語のテキストです。漢字とかなが混ざっています。",
        "مرحبا بالعالم، كيف حالك اليوم؟",
        "नमस्ते दुनिया, आप कैसे हैं?",
        "🎉 emoji 👩‍👩‍👧 and ﬁne ligatures, naïve cafe\u0301",
        "def main():\n\tprint('it''s', 12345, x  == 0)  \r\n\r\n",
        *("", " ", "  two  spaces  ", "x" * 60, "IT'S don'T", "▁literal"),
    ]
    return found * 3 + ["".join(numbers.choices(LETTERS, k=numbers.randrange(1, 60))) for _ in range(400)]


def ids(core: Tokenizer, text: str) -> list[int]:
    return list(core.encode(text, add_special_tokens=False).ids)


def train_sentencepiece(folder: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts()), model_writer=out, vocab_size=500, character_coverage=0.99,
        hard_vocab_limit=False, minloglevel=2, num_threads=1, **options,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"model_type": "unigram"}, id="unigram"),
        pytest.param({"model_type": "unigram", "byte_fallback": True}, id="unigram bytes"),
        pytest.param({"model_type": "bpe"}, id="bpe"),
        pytest.param({"model_type": "bpe", **IDENTITY}, id="bpe as llama 2"),
        pytest.param(
            {"model_type": "bpe", **IDENTITY, "add_dummy_prefix": False, "user_defined_symbols": ["<tool>", "\n\n"]},
            id="bpe as gemma",
        ),
    ],
)
def test_sentencepiece_models(tmp_path: Path, options: dict[str, Any]) -> None:
    original = train_sentencepiece(tmp_path, **options)
    core = convert(tmp_path / "tokenizer.model")
    for text in [*texts(), "a <tool> b<tool>c\n\nd"]:
        expected = original.encode(text)
        assert ids(core, text) == expected, text
        if original.unk_id() not in expected:
            assert core.decode(expected) == original.decode(expected), text
    bos, eos = original.bos_id(), original.eos_id()
    assert core.encode("a").ids == [bos, *original.encode("a")]
    settings = {"add_bos_token": False, "add_eos_token": True, "added_tokens_decoder": {}}
    settings["added_tokens_decoder"] = {str(len(original)): {"content": "<|user|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    core = convert(tmp_path / "tokenizer.model")
    assert core.encode("a").ids == [*original.encode("a"), eos]
    assert core.encode("<|user|></s>", add_special_tokens=False).ids == [len(original), eos]


def test_the_newer_form_adds_a_space_only_before_the_first_text(tmp_path: Path) -> None:
    original = train_sentencepiece(tmp_path, model_type="bpe", **IDENTITY)
    prefixed, plain = original.encode("ab"), original.encode("ab", out_type=str)
    for legacy in (True, False):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
        core = convert(tmp_path / "tokenizer.model")
        assert ids(core, "ab") == prefixed
        second = [core.id_to_token(token) for token in ids(core, "ab</s>ab")][len(plain) + 1 :]
        assert "".join(second) == ("▁ab" if legacy else "ab")


def train_byte_level(pattern: str) -> dict[bytes, int]:
    """Return tokens with their ranks, as in a tiktoken file."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts(), trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    )
    letters = byte_alphabet()
    return {bytes(letters[letter] for letter in token): rank for token, rank in core.get_vocab().items()}


def write_ranks(path: Path, ranks: dict[bytes, int]) -> None:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    path.write_text("".join(lines))


@pytest.mark.parametrize(
    ("name", "pattern", "normalize"),
    [
        pytest.param("tokenizer.model", LLAMA3, str, id="llama 3"),
        pytest.param("cl100k_base.tiktoken", CL100K, str, id="cl100k"),
        pytest.param("o200k_base.tiktoken", O200K, str, id="o200k"),
        pytest.param("qwen.tiktoken", QWEN, lambda text: unicodedata.normalize("NFC", text), id="qwen"),
    ],
)
def test_tiktoken_ranks(tmp_path: Path, name: str, pattern: str, normalize: Callable[[str], str]) -> None:
    ranks = train_byte_level(LLAMA3)
    write_ranks(tmp_path / name, ranks)
    original = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    assert find_source(tmp_path) == tmp_path / name
    core = convert(tmp_path / name)
    for text in texts():
        assert ids(core, text) == original.encode_ordinary(normalize(text)), text
        assert core.decode(ids(core, text)) == normalize(text)


@pytest.mark.parametrize(
    ("class_name", "pattern"), [("GPT2Tokenizer", None), ("Qwen2TokenizerFast", QWEN), ("RobertaTokenizer", None)]
)
def test_vocabulary_and_merges(tmp_path: Path, class_name: str, pattern: str | None) -> None:
    original = Tokenizer(models.BPE())
    tokenizer_convert.set_byte_level(original, pattern)
    special = ["<s>", "</s>", "<unk>", "<pad>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    original.train_from_iterator(texts(), trainer)
    original.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": class_name}))
    core = convert(tmp_path / "vocab.json")
    for text in texts():
        expected = unicodedata.normalize("NFC", text) if pattern else text
        assert ids(core, text) == ids(original, expected), text
    if class_name == "RobertaTokenizer":
        a, b = ids(core, "a"), ids(core, "b")
        assert core.encode("a", "b").ids == [0, *a, 1, 1, *b, 1]
        assert ids(core, "a<mask>") == [*a, 4]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="uncased"),
        pytest.param({"do_lower_case": False, "tokenizer_class": "BertTokenizer"}, id="cased"),
        pytest.param({"strip_accents": False, "tokenize_chinese_chars": False}, id="accents"),
        pytest.param({"cls_token": "<cls>", "sep_token": "<sep>", "do_lower_case": False}, id="names"),
    ],
)
def test_a_vocabulary_of_bert(tmp_path: Path, settings: dict[str, Any]) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<cls>", "<sep>"]
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trained.train_from_iterator(
        texts(), trainers.WordPieceTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    )
    tokens = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in tokens))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert find_source(tmp_path) == tmp_path / "vocab.txt"
    core, original = convert(tmp_path / "vocab.txt"), transformers.BertTokenizer.from_pretrained(tmp_path)
    check_equal(core, original, "[MASK]")


def test_a_sentencepiece_model_of_xlm_roberta(tmp_path: Path) -> None:
    trained = train_sentencepiece(tmp_path, model_type="unigram", normalization_rule_name="nmt_nfkc")
    path = (tmp_path / "tokenizer.model").rename(tmp_path / "sentencepiece.bpe.model")
    assert find_source(tmp_path) == path
    # transformers reads such files with protobuf, which is not installed.
    pieces = [(trained.id_to_piece(number), trained.get_score(number)) for number in range(3, len(trained))]
    special = [(text, 0.0) for text in ("<s>", "<pad>", "</s>", "<unk>")]
    original = transformers.XLMRobertaTokenizer(
        vocab=[*special, *pieces, ("<mask>", 0.0)],
        _spm_precompiled_charsmap=sentencepiece_file.parse(path.read_bytes()).charsmap,
    )
    core = convert(path)
    assert core.token_to_id("<mask>") == core.get_vocab_size() - 1
    check_equal(core, original, "<mask>")
    for settings, message in (
        ({"tokenizer_class": "CamembertTokenizer"}, "Camembert"),
        ({"added_tokens_decoder": {"3": {"content": "<mask>"}}}, "has the id 3"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(ModelError, match=message):
            convert(path)


def check_equal(core: Tokenizer, original: Any, mask: str) -> None:
    """Check that single texts, pairs and special tokens have the ids of transformers' fast tokenizer."""
    assert original.is_fast
    for first, second in itertools.pairwise([*texts(), f"a {mask} b{mask}", "x"]):
        assert ids(core, first) == original.encode(first, add_special_tokens=False), first
        single, pair = original(first), original(first, second := second or "y")  # transformers takes "" for no text
        assert core.encode(first).ids == single["input_ids"]
        assert core.encode(first, second).ids == pair["input_ids"]
        if "token_type_ids" in pair:
            assert core.encode(first, second).type_ids == pair["token_type_ids"]
        assert core.decode(single["input_ids"]) == original.decode(single["input_ids"], skip_special_tokens=True)


def test_a_tokenizer_json_is_used_unchanged(tmp_path: Path) -> None:
    assert find_source(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"")
    assert find_source(tmp_path) == tmp_path / "tokenizer.model"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert find_source(tmp_path) is None


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("model")
    train_sentencepiece(folder, model_type="bpe")
    return (folder / "tokenizer.model").read_bytes()


def test_a_damaged_sentencepiece_file_is_rejected_or_read_completely(tmp_path: Path, model_file: bytes) -> None:
    """Every truncation and random change gives a tokenizer or a typed error, and no other exception."""
    numbers, path, errors = random.Random(0), tmp_path / "tokenizer.model", 0
    for number in range(60):
        data = bytearray(model_file)
        if number % 2:
            del data[numbers.randrange(len(data)) :]
        else:
            for _ in range(8):
                data[numbers.randrange(min(len(data), 20_000))] = numbers.randrange(256)
        path.write_bytes(data)
        try:
            convert(path)
        except ModelError as exc:
            assert str(path) in str(exc)
            errors += 1
    assert errors > 20


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("tokenizer.model", b"", "no pieces", id="empty"),
        pytest.param("tokenizer.model", b"\x0a\xff\xff\xff\xff\x0f", "truncated", id="length"),
        pytest.param("x.tiktoken", b"AA== 0\n", "pattern is not known", id="unknown name"),
        pytest.param("qwen.tiktoken", b"AA==\n", "line 1", id="line"),
        pytest.param("qwen.tiktoken", b"AA== 0\nAQ== x\n", "line 2", id="rank"),
        pytest.param("qwen.tiktoken", b"AA== 0\nAA== 1\n", "line 2", id="repeated"),
        pytest.param("qwen.tiktoken", b"AA== 0\n", "each byte", id="bytes"),
        pytest.param("vocab.json", b"{}", "merges.txt", id="no merges"),
        pytest.param("vocab.txt", b"[UNK]\n[CLS]\n", r"no token \[SEP\], which is the sep_token", id="no separator"),
        pytest.param("vocab.txt", b"\xff", "decode", id="not UTF-8"),
        pytest.param("sentencepiece.bpe.model", b"\x0a\x03\x0a\x01a", "first three pieces", id="one piece"),
    ],
)
def test_an_error_names_the_file(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message) as exc_info:
        convert(tmp_path / name)
    assert str(tmp_path) in str(exc_info.value)


def test_too_large_files_and_wrong_ids_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "qwen.tiktoken"
    write_ranks(path, {bytes([byte]): byte for byte in range(256)})
    settings = {"added_tokens_decoder": {"300": {"content": "<|user|>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="has the id 300; its place is 256"):
        convert(path)
    monkeypatch.setattr(tokenizer_convert, "MAX_FILE_BYTES", 100)
    with pytest.raises(ModelError, match="too large"):
        convert(path)


def test_user_defined_pieces_need_a_model_that_keeps_spaces(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path, model_type="bpe", user_defined_symbols=["<tool>"])
    with pytest.raises(ModelError, match="user-defined"):
        convert(tmp_path / "tokenizer.model")


def test_a_model_directory_gets_a_converted_tokenizer_once(tmp_path: Path) -> None:
    source, data_dir = tmp_path / "My model", tmp_path / "data"
    make_cross_encoder(source)
    (source / "tokenizer.json").unlink()
    train_sentencepiece(source, model_type="bpe", **IDENTITY)
    spec = ModelSpec("m", str(source), "auto")
    directory = ensure_model(spec, data_dir)
    assert directory.parent == data_dir / "models"
    assert directory.name.startswith("my-model-")
    assert not (source / "tokenizer.json").exists()
    assert (directory / "model.safetensors").resolve() == source / "model.safetensors"
    tokenizer = ModelTokenizer.from_dir(directory)
    assert tokenizer.decode(tokenizer.encode("Привет, 日本語 x")) == "Привет, 日本語 x"
    written = (directory / "tokenizer.json").stat().st_mtime_ns
    assert ensure_model(spec, data_dir) == directory
    assert (directory / "tokenizer.json").stat().st_mtime_ns == written

    (source / "tokenizer_config.json").write_text('{"add_eos_token": true}')
    assert ensure_model(spec, data_dir) != directory
    (source / "tokenizer.model").write_bytes(b"\x0a\xff\x0f")
    with pytest.raises(ModelError, match=r"tokenizer\.model: the tokenizer cannot be converted: it is truncated"):
        ensure_model(spec, data_dir)
    assert not list((data_dir / "models").glob(".*.partial"))
