"""Conversion of other tokenizer files to tokenizer.json, without downloads and without the original libraries.

Supported are SentencePiece models (`tokenizer.model`, and XLM-RoBERTa's `sentencepiece.bpe.model`), tiktoken's ranks
(`*.tiktoken`, and Llama 3's `tokenizer.model`), GPT-2's `vocab.json` with `merges.txt`, and BERT's `vocab.txt`.
Increment `CONVERTER_VERSION` when the output changes.

Token ids equal those of the original libraries, with one exception: where a SentencePiece rule changes a letter that a
combining mark follows, the tokenizers library drops the mark.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from inference_worker.checkpoints import sentencepiece_file
from inference_worker.checkpoints.model_config import ModelError, read_json
from inference_worker.checkpoints.sentencepiece_file import PieceType, SentencePieceFile
from inference_worker.checkpoints.tokenizer import byte_alphabet

T = TypeVar("T", str, bytes)

CONVERTER_VERSION = 1
MAX_FILE_BYTES = 64 << 20
MAX_TOKENS = 1 << 20
MAX_TOKEN_BYTES = 1 << 10
OTHER_FILES = ("tokenizer_config.json", "added_tokens.json", "merges.txt")  # files that determine the result
SPACE = "▁"
_XLM_ROBERTA_FILE = "sentencepiece.bpe.model"
# The patterns by which tiktoken's encodings split a text before merging.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (  # pattern of Mistral Nemo
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# File name -> the pattern, and whether texts are normalized to NFC.
_TIKTOKEN: Mapping[str, tuple[str, bool]] = {
    "tokenizer.model": (LLAMA3, False),
    "cl100k_base.tiktoken": (LLAMA3, False),
    "o200k_base.tiktoken": (O200K, False),
    "qwen.tiktoken": (QWEN, True),
}


def find_source(directory: Path) -> Path | None:
    """Return the file to convert, or None if there is none or a tokenizer.json exists."""
    if (directory / "tokenizer.json").exists():
        return None
    names = (_XLM_ROBERTA_FILE, "vocab.json", "vocab.txt")
    candidates = [directory / "tokenizer.model", *sorted(directory.glob("*.tiktoken")), *map(directory.joinpath, names)]
    return next((path for path in candidates if path.is_file()), None)


def convert(source: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of the file `source`, with the special tokens of tokenizer_config.json.

    Raises:
        ModelError: a file is damaged or too large, or its type is not supported.
    """
    directory = source.parent
    settings = _settings(directory)
    try:
        if source.name == "vocab.json":
            core = _from_merges(source, settings)
        elif source.name == "vocab.txt":
            core = _from_words(read_bounded(source), settings)
        elif source.name == _XLM_ROBERTA_FILE:
            core = _from_xlm_roberta(read_bounded(source), settings)
        else:
            data = read_bounded(source)
            if _is_tiktoken(source, data):
                core = _from_ranks(source, data)
            else:
                core = from_sentencepiece(sentencepiece_file.parse(data), settings)
            _add_frame(core, settings, default_bos=source.name == "tokenizer.model")
        _add_tokens(core, directory, settings)
    except ModelError:
        raise
    except Exception as exc:  # noqa: BLE001 - the tokenizers library raises plain Exception for invalid values
        raise ModelError(f"{source}: the tokenizer cannot be converted: {exc}") from None
    return core


def read_bounded(path: Path) -> bytes:
    """Return the content of a tokenizer's file, whose size is limited.

    Raises:
        ModelError: it does not exist or is too large.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise ModelError(f"{path}: {size} bytes is too large for a tokenizer")
    return path.read_bytes()


def _settings(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return read_json(path) if path.exists() else {}


# SentencePiece


def from_sentencepiece(
    file: SentencePieceFile, settings: Mapping[str, Any], *, is_gguf: bool = False
) -> tokenizers.Tokenizer:
    """Return the tokenizer of a SentencePiece model.

    Args:
        settings: tokenizer_config.json.
        is_gguf: the pieces are those of a GGUF file. Unused ones are not part of any merge, so no text gets them.
            User-defined ones are tokens that were added to the model, and split the text as control tokens do.

    Raises:
        ValueError: the model is damaged or not supported.
    """
    if not file.escapes_spaces or file.whitespace_is_suffix:
        raise ValueError("only models with escaped spaces before words are supported")
    unknown = [token_id for token_id, piece in enumerate(file.pieces) if piece.type is PieceType.UNKNOWN]
    if len(unknown) != 1:
        raise ValueError(f"it has {len(unknown)} unknown tokens; want one")
    if len({piece.text for piece in file.pieces}) < len(file.pieces):
        raise ValueError("it has two equal pieces")
    own_pieces = [piece.text for piece in file.pieces if piece.type is PieceType.USER_DEFINED]
    if own_pieces and not is_gguf and (file.adds_prefix or file.removes_spaces):
        raise ValueError("user-defined pieces are supported only if the model keeps spaces and adds none")
    if not all(math.isfinite(piece.score) for piece in file.pieces):
        raise ValueError("a score is not a number")
    if file.model_type == sentencepiece_file.UNIGRAM:
        vocab = [(piece.text, piece.score) for piece in file.pieces]
        model: Any = models.Unigram(vocab, unknown[0], byte_fallback=file.byte_fallback)
    elif file.model_type == sentencepiece_file.BPE:
        if not is_gguf and any(piece.type is PieceType.UNUSED for piece in file.pieces):
            raise ValueError("unused pieces are not supported")
        model = _sentencepiece_bpe(file, file.pieces[unknown[0]].text)
    else:
        raise ValueError("its type is not supported; want unigram or BPE")
    core = tokenizers.Tokenizer(model)
    steps: list[Any] = [normalizers.Precompiled(file.charsmap)] if file.charsmap else []
    if file.removes_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    # The older behavior, which is the default, adds a space after each special token, too.
    only_first = file.adds_prefix and settings.get("legacy") is False
    if file.adds_prefix and not only_first:
        steps.append(normalizers.Prepend(SPACE))
    core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if only_first:
        core.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    strip = [decoders.Strip(" ", 1, 0)] if file.adds_prefix else []
    core.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    special = (PieceType.CONTROL, PieceType.UNKNOWN)
    core.add_special_tokens([piece.text for piece in file.pieces if piece.type in special])
    core.add_tokens([AddedToken(text, normalized=False) for text in own_pieces])
    return core


def _from_xlm_roberta(data: bytes, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return XLM-RoBERTa's tokenizer. Four special tokens precede the pieces, and replace the model's first three."""
    _check_class(settings, "XLMRobertaTokenizer")
    file = sentencepiece_file.parse(data)
    if file.model_type != sentencepiece_file.UNIGRAM or not file.escapes_spaces or file.byte_fallback:
        raise ValueError("its type is not supported; want unigram without bytes")
    if {piece.text for piece in file.pieces[:3]} != {"<s>", "</s>", "<unk>"}:
        raise ValueError("its first three pieces are not <unk>, <s> and </s>")
    vocab = [(text, 0.0) for text in ("<s>", "<pad>", "</s>", "<unk>")]
    vocab += [(piece.text, piece.score) for piece in file.pieces[3:]]
    vocab.append(("<mask>", 0.0))
    if len({text for text, _ in vocab}) < len(vocab) or not all(math.isfinite(score) for _, score in vocab):
        raise ValueError("it has two equal pieces, or a score that is not a number")
    core = tokenizers.Tokenizer(models.Unigram(vocab, 3, byte_fallback=False))
    if file.charsmap:
        core.normalizer = normalizers.Precompiled(file.charsmap)
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")]
    )
    core.decoder = decoders.Metaspace(SPACE, prepend_scheme="always")
    core.add_special_tokens([text for text, _ in vocab[:4]])
    core.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return core


def _sentencepiece_bpe(file: SentencePieceFile, unknown: str) -> Any:
    vocab = {piece.text: token_id for token_id, piece in enumerate(file.pieces)}
    scores = {piece.text: -piece.score for piece in file.pieces if piece.type is PieceType.NORMAL}
    merges = _merges(scores, vocab.__getitem__)
    return models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=file.byte_fallback)


def _merges(tokens: Mapping[T, float], rank: Callable[[T], int]) -> list[tuple[T, T]]:
    """Return every pair of tokens that form a token. Tokens with a lower number are formed first."""
    merges = []
    for token, order in tokens.items():
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in tokens and right in tokens:
                merges.append((order, rank(left), rank(right), left, right))
    merges.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in merges]


# tiktoken


def _is_tiktoken(source: Path, data: bytes) -> bool:
    """Return whether the file has tiktoken's lines. Llama 3's file has the name of a SentencePiece model."""
    return source.suffix == ".tiktoken" or data[:64].split(b"\n")[0].split(b" ")[-1].isdigit()


def _from_ranks(source: Path, data: bytes) -> tokenizers.Tokenizer:
    if source.name not in _TIKTOKEN:
        raise ValueError(f"its pattern is not known; want one of the names {', '.join(_TIKTOKEN)}")
    pattern, is_normalized = _TIKTOKEN[source.name]
    ranks = _ranks(data)
    letters = {byte: letter for letter, byte in byte_alphabet().items()}

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = _merges(ranks, ranks.__getitem__)
    vocab = {spell(token): rank for token, rank in ranks.items()}
    spelled = [(spell(left), spell(right)) for left, right in merges]
    core = tokenizers.Tokenizer(models.BPE(vocab, spelled, ignore_merges=True))
    set_byte_level(core, pattern)
    if is_normalized:
        core.normalizer = normalizers.NFC()
    return core


def _ranks(data: bytes) -> dict[bytes, int]:
    """Return the rank of each token."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            encoded, text = line.split(b" ")
            token, rank = base64.b64decode(encoded, validate=True), int(text)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number} is not a token in base64 and its rank") from None
        if not 0 < len(token) <= MAX_TOKEN_BYTES or not 0 <= rank < MAX_TOKENS or token in ranks:
            raise ValueError(f"line {number} has an invalid token or rank")
        ranks[token] = rank
    if len(set(ranks.values())) < len(ranks):
        raise ValueError("two tokens have the same rank")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError("it does not have a token for each byte")
    return ranks


def set_byte_level(core: tokenizers.Tokenizer, pattern: str | None) -> None:
    """Split by the pattern, or by GPT-2's if there is none, and use bytes as the smallest tokens."""
    if pattern is None:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    core.decoder = decoders.ByteLevel()


# vocab.json and merges.txt


def _from_merges(source: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    class_name = _check_class(settings, "GPT2Tokenizer", "Qwen2Tokenizer", "RobertaTokenizer")
    merges_path = source.with_name("merges.txt")
    data, lines = read_bounded(source), read_bounded(merges_path).decode().splitlines()
    merges: list[tuple[str, str]] = []
    for line in lines:
        if line and not line.startswith("#version"):
            left, right = line.split(" ")
            merges.append((left, right))
    vocab = json.loads(data)
    core = tokenizers.Tokenizer(models.BPE(vocab, merges))
    set_byte_level(core, QWEN if class_name == "Qwen2Tokenizer" else None)
    if class_name == "Qwen2Tokenizer":
        core.normalizer = normalizers.NFC()
    if class_name == "RobertaTokenizer":
        start, end = (
            _text(settings.get(name), default) for name, default in (("cls_token", "<s>"), ("sep_token", "</s>"))
        )
        core.post_processor = processors.RobertaProcessing((end, vocab[end]), (start, vocab[start]))
        defaults = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        core.add_special_tokens([text for text in defaults.values() if text in vocab])
        if "<mask>" in vocab:
            core.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    return core


# vocab.txt


def _from_words(data: bytes, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    _check_class(settings, "BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
    lines = data.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if not lines[-1]:
        lines.pop()
    if len(lines) > MAX_TOKENS:
        raise ValueError("it has too many tokens")
    vocab = {token: token_id for token_id, token in enumerate(lines)}
    names = {name: _text(settings.get(f"{name}_token"), f"[{name.upper()}]") for name in ("unk", "cls", "sep")}
    for name, text in names.items():
        if text not in vocab:
            raise ValueError(f"it has no token {text}, which is the {name}_token")
    core = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=names["unk"]))
    accents = settings.get("strip_accents")
    core.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
        strip_accents=accents if isinstance(accents, bool) else None,
        lowercase=bool(settings.get("do_lower_case", True)),
    )
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(prefix="##")
    start, end = names["cls"], names["sep"]
    core.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B:1 {end}:1",
        special_tokens=[(start, vocab[start]), (end, vocab[end])],
    )
    others = (_text(settings.get(f"{name}_token"), f"[{name.upper()}]") for name in ("pad", "mask"))
    core.add_special_tokens([*names.values(), *(text for text in others if text in vocab)])
    return core


# Special tokens


def _check_class(settings: Mapping[str, Any], *supported: str) -> str:
    """Return the tokenizer's class in tokenizer_config.json, by default the first supported one."""
    name = str(settings.get("tokenizer_class") or supported[0]).removesuffix("Fast")
    if name not in supported:
        raise ValueError(f"the tokenizer class {name!r} is not supported with this file; want {' or '.join(supported)}")
    return name


def _add_frame(core: tokenizers.Tokenizer, settings: Mapping[str, Any], *, default_bos: bool) -> None:
    """Add the tokens at the beginning and the end of a text, as tokenizer_config.json sets them."""
    adds = {"bos": settings.get("add_bos_token", default_bos), "eos": settings.get("add_eos_token", False)}
    names = {"bos": _text(settings.get("bos_token"), "<s>"), "eos": _text(settings.get("eos_token"), "</s>")}
    frame = {}
    for name, is_added in adds.items():
        token_id = core.token_to_id(names[name])
        if is_added and token_id is not None:
            frame[name] = (names[name], token_id)
    if frame:
        bos, eos = ([frame[name][0]] if name in frame else [] for name in ("bos", "eos"))
        core.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos], pair=[*bos, "$A", *eos, *bos, "$B:1", *eos], special_tokens=list(frame.values())
        )


def _add_tokens(core: tokenizers.Tokenizer, directory: Path, settings: Mapping[str, Any]) -> None:
    """Add the tokens of tokenizer_config.json and added_tokens.json, whose ids follow the vocabulary."""
    added: dict[int, AddedToken] = {}
    path = directory / "added_tokens.json"
    for content, token_id in (read_json(path) if path.exists() else {}).items():
        added[int(token_id)] = AddedToken(content, normalized=False)
    for token_id, fields in (settings.get("added_tokens_decoder") or {}).items():
        flags = {name: bool(fields.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        added[int(token_id)] = AddedToken(fields["content"], **flags)
    if len(added) > MAX_TOKENS:
        raise ValueError("it has too many added tokens")
    for token_id, token in sorted(added.items(), key=lambda item: item[0]):
        (core.add_special_tokens if token.special else core.add_tokens)([token])
        if (actual := core.token_to_id(token.content)) != token_id:
            raise ValueError(f"the added token {token.content!r} has the id {token_id}; its place is {actual}")


def _text(value: Any, default: str) -> str:
    if isinstance(value, dict):  # an AddedToken, written out
        value = value.get("content")
    return value if isinstance(value, str) else default
