"""The tokenizer of a GGUF file as tokenizer.json, tokenizer_config.json and chat_template.jinja."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from inference_worker.checkpoints import tokenizer_convert
from inference_worker.checkpoints.gguf_fields import Fields
from inference_worker.checkpoints.gguf_header import GGUFError
from inference_worker.checkpoints.sentencepiece_file import BPE, UNIGRAM, PieceType, SentencePieceFile, VocabularyEntry

log = logging.getLogger(__name__)

# Rules by which a text is split before merging, by their names in GGUF files. None: GPT-2's pattern.
_GPT2, _DIGITS, _DEFAULT = None, "digits", "default"
_SPLITS: dict[str, str | None] = {
    "chatglm-bpe": tokenizer_convert.LLAMA3,
    "codeshell": _DIGITS,
    "command-r": _DIGITS,
    "dbrx": tokenizer_convert.LLAMA3,
    "deepseek-r1-qwen": tokenizer_convert.QWEN,
    "default": _DEFAULT,
    "falcon3": tokenizer_convert.LLAMA3,
    "glm4": tokenizer_convert.LLAMA3,
    "gpt-2": _GPT2,
    "gpt-4o": tokenizer_convert.O200K,
    "llama-bpe": tokenizer_convert.LLAMA3,
    "llama-v3": tokenizer_convert.LLAMA3,
    "llama3": tokenizer_convert.LLAMA3,
    "megrez": tokenizer_convert.QWEN,
    "olmo": _GPT2,
    "pixtral": tokenizer_convert.LLAMA3,
    "qwen2": tokenizer_convert.QWEN,
    "refact": _DIGITS,
    "smaug-bpe": tokenizer_convert.LLAMA3,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": tokenizer_convert.TEKKEN,
}
# The patterns of the rule "default", each of which splits the pieces of those before.
_DEFAULT_PATTERNS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_NORMALIZED = ("qwen2", "deepseek-r1-qwen")  # to NFC
_LLAMA3_NAMES = ("llama-bpe", "llama-v3", "llama3", "falcon3", "pixtral")
_WHOLE_WORDS = (*_LLAMA3_NAMES, "tekken", "gpt-4o")  # a word that is a token is not merged
_MODELS = {"llama": BPE, "t5": UNIGRAM}
# The rules of files that do not name one, by their architectures.
_RULES = {"qwen2": "qwen2", "qwen2moe": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2", "glm4": "glm4"}
_LLAMA3_TOKEN, _UNKNOWN_TOKEN = "<|begin_of_text|>", "<unk>"
# Values of `add_bos_token` and `add_eos_token` in files that do not have them, by the tokenizer's model. Of tokenizers
# of bytes, these rules add the first token.
_FRAMES = {"llama": (True, False), "t5": (False, True), "gpt2": (False, False)}
_BOS_RULES = (*_LLAMA3_NAMES, "tekken")


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
    adds_bos, adds_eos = _FRAMES[model]
    try:
        if model == "gpt2":
            rule = _rule(fields, tokens)
            core, adds_bos = _from_merges(fields, tokens, rule), rule in _BOS_RULES
        else:
            core = _from_pieces(fields, tokens, _MODELS[model])
        _add_frame(core, fields, special, adds_bos=adds_bos, adds_eos=adds_eos)
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


def _rule(fields: Fields, tokens: list[str]) -> str:
    """Return the name of the rule by which texts are split."""
    name = fields.text("tokenizer.ggml.pre", "")
    if not name:  # files of before 2024, and of some converters
        is_llama3 = fields.architecture == "llama" and _LLAMA3_TOKEN in tokens
        name = "llama-bpe" if is_llama3 else _RULES.get(fields.architecture, "default")
        log.warning("%s does not have tokenizer.ggml.pre: texts are split by the rule %r", fields.file.path, name)
    if name not in _SPLITS:
        raise ValueError(f"the rule {name!r:.40} is not supported; want one of {', '.join(_SPLITS)}")
    return name


def _from_merges(fields: Fields, tokens: list[str], name: str) -> tokenizers.Tokenizer:
    """Return a tokenizer of bytes with merges."""
    merges = []
    for line in fields.items("tokenizer.ggml.merges", str):
        left, _, right = line.partition(" ")
        merges.append((left, right))
    vocab = {text: token_id for token_id, text in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise ValueError("it has two equal tokens")
    core = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=name in _WHOLE_WORDS))
    split = _SPLITS[name]
    tokenizer_convert.set_byte_level(core, None if split in (_DIGITS, _DEFAULT) else split)
    if split == _DEFAULT:
        splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in _DEFAULT_PATTERNS]
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
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
    types, scores = _with_unknown(fields, tokens), fields.items("tokenizer.ggml.scores", float)
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
    return tokenizer_convert.from_sentencepiece(file, {}, is_gguf=True)


def _with_unknown(fields: Fields, tokens: list[str]) -> list[PieceType]:
    """Return the types of the tokens with one unknown token, which files of Gemma 3 mark as a control token."""
    types = _types(fields, tokens)
    if types.count(PieceType.UNKNOWN) == 1:
        return types
    unknown = fields.token("unknown")
    if unknown is None and _UNKNOWN_TOKEN in tokens:
        unknown = tokens.index(_UNKNOWN_TOKEN)
    if unknown is None or not 0 <= unknown < len(tokens):
        return types
    types = [PieceType.UNUSED if kind is PieceType.UNKNOWN else kind for kind in types]
    types[unknown] = PieceType.UNKNOWN
    return types


def _add_frame(
    core: tokenizers.Tokenizer, fields: Fields, special: dict[str, str], *, adds_bos: bool, adds_eos: bool
) -> None:
    """Add the tokens at the beginning and the end of a text.

    Args:
        adds_bos: the value of a file that does not have it; `adds_eos` as well.
    """
    wanted = {
        "bos": fields.get("tokenizer.ggml.add_bos_token", bool, adds_bos),
        "eos": fields.get("tokenizer.ggml.add_eos_token", bool, adds_eos),
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
