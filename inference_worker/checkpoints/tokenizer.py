"""Tokenizers: text to token ids and back, and chat messages to prompts. Does not import torch."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from inference_worker.checkpoints.chat_template import ChatTemplate, ChatTemplateError
from inference_worker.checkpoints.control_tokens import ControlTokens, SeparatedContents
from inference_worker.checkpoints.detokenizer import Detokenizer
from inference_worker.checkpoints.input_encoder import EncodedInput, InputEncoder, InputLimit, fit_pair
from inference_worker.checkpoints.model_config import ModelError, read_json, token_ids
from inference_worker.checkpoints.reasoning import ReasoningSplitter
from inference_worker.checkpoints.template_probe import TemplateTraits, probe_template
from inference_worker.checkpoints.template_work import WorkBudget
from inference_worker.contract.output_formats import (
    AUTO,
    HERMES,
    MARK_TOKENS,
    choose_reasoning_format,
    choose_tool_format,
)
from inference_worker.contract.request import SamplingParams

__all__ = ["ChatTemplateError", "Detokenizer", "Tokenizer"]

MAX_TOKENIZER_BYTES = 256 << 20
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # the name of a token of one byte


class Tokenizer:
    """A model's tokenizer: `tokenizer.json`, with the special tokens and the chat template of tokenizer_config.json."""

    # Whether small prompts were measured to be rendered with little work; None: not measured.
    is_template_cheap: bool | None = None
    # The forms of conversations that the chat template takes; None: not probed.
    template_traits: TemplateTraits | None = None

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        chat_template: str | None,
        special_tokens: dict[str, str],
        eos_token_ids: tuple[int, ...],
        model_max_length: int,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        self._core = core
        self._core.no_truncation()
        self._core.no_padding()
        self.inputs = InputEncoder(core)
        self.eos_token_ids = eos_token_ids
        self.model_max_length = model_max_length
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        added = core.get_added_tokens_decoder()
        self.control_tokens = ControlTokens(core, chat_template)
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes_table = self._make_bytes_table() if self.is_byte_level else []
        self.neutral_ids: Sequence[int] = () if self.is_byte_level else self._find_neutral_ids()
        self._chat = ChatTemplate(chat_template, dict(special_tokens)) if chat_template else None
        self.longest_token_bytes = self._measure_longest_token()
        # The formats in which the model writes tool calls and reasoning; None: it writes none that is parsed.
        self.tool_format = choose_tool_format(tool_parser, chat_template)
        if tool_parser == AUTO and not self.template_takes_tools:
            self.tool_format = HERMES  # tools are described as text, in this format
        self.reasoning_format = choose_reasoning_format(reasoning_parser, chat_template)

    @classmethod
    def from_dir(
        cls, path: str | Path, *, tool_parser: str = AUTO, reasoning_parser: str = AUTO, chat_template: str = ""
    ) -> Tokenizer:
        """Read the tokenizer of the model directory `path`.

        Args:
            tool_parser: a name in `TOOL_FORMATS`, "none", or "auto" for the chat template's format.
            reasoning_parser: the same in `REASONING_FORMATS`.
            chat_template: replaces the directory's template.

        Raises:
            ModelError: a file is missing or damaged.
        """
        directory = Path(path)
        core = read_core(directory / "tokenizer.json")
        settings = _optional(directory / "tokenizer_config.json")
        special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(settings.get(name))) is not None}
        config, generation = _optional(directory / "config.json"), _optional(directory / "generation_config.json")
        eos = list(token_ids(generation.get("eos_token_id", config.get("eos_token_id"))))
        own_eos = core.token_to_id(special["eos_token"]) if "eos_token" in special else None
        if own_eos is not None and own_eos not in eos:
            eos.append(own_eos)
        limit = settings.get("model_max_length")
        if not isinstance(limit, int) or limit > 1 << 30:  # transformers writes 10**30 for "no limit"
            limit = config.get("max_position_embeddings", 1 << 30)
        try:
            return cls(
                core,
                chat_template=chat_template or _chat_template(directory, settings),
                special_tokens=special,
                eos_token_ids=tuple(eos),
                model_max_length=int(limit),
                tool_parser=tool_parser,
                reasoning_parser=reasoning_parser,
            )
        except ChatTemplateError as exc:
            raise ModelError(f"{directory}: {exc}") from None

    def encode(self, text: str, *, add_special_tokens: bool = True, separator: str = "") -> list[int]:
        """Return the ids of `text`.

        Args:
            add_special_tokens: adds a beginning-of-text token if the model uses one.
            separator: a character of `ControlTokens` in the text, which gets no tokens.
        """
        if separator:
            return [token_id for token_id, *_ in self._encode_separated(text, separator, add_special_tokens)]
        # A batch of one, because `encode` does not release the GIL, for seconds if the text is long.
        (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def _encode_separated(self, text: str, separator: str, add_special_tokens: bool) -> list[tuple[int, int, int]]:
        """Return the ids of a text without those of its separators, each with its token's start and end in the text."""
        (encoding,) = self._core.encode_batch([text], add_special_tokens=add_special_tokens)
        return [
            (token_id, start, end)
            for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if not separator or text[start:end] != separator
        ]

    def encode_rendered_pair(
        self,
        instruction: str,
        query: str,
        document: str,
        limit: InputLimit | None = None,
        max_document_tokens: int | None = None,
        budget: WorkBudget | None = None,
        *,
        separates: bool = True,
    ) -> EncodedInput:
        """Return the ids of a pair of texts in the chat template, with the roles query and document.

        Args:
            instruction: the system message; empty: none.
            limit: of the whole pair, for which its texts are truncated.
            max_document_tokens: truncates the document.
            budget: as for `render_chat`.
            separates: tokenizes control tokens in the texts as text.

        Raises:
            ChatTemplateError: the template cannot render the pair.
            InputTooLong: the template leaves no room for the texts.
        """
        messages = [{"role": "system", "content": instruction}] if instruction else []
        messages += [{"role": "query", "content": query}, {"role": "document", "content": document}]
        separated = self.separate_contents(messages) if separates else None
        messages, separator = (messages, "") if separated is None else (separated.messages, separated.separator)
        keeps_end = limit is not None and limit.keeps_end
        texts = [message["content"] for message in messages[-2:]]
        tokens: list[list[tuple[int, int, int]]] = []

        def render(*rooms: int) -> list[int]:
            """Return the ids of the pair with at most these tokens of each text; without arguments, with all."""
            parts = texts
            if rooms:
                found = zip(texts, tokens, rooms, strict=True)
                parts = [_cut(text, spans, room, keeps_end=keeps_end) for text, spans, room in found]
            pair = [{**message, "content": part} for message, part in zip(messages[-2:], parts, strict=True)]
            rendered = self.render_chat([*messages[:-2], *pair], budget=budget)
            rendered = rendered if separated is None else separated.restore(rendered)
            return self.encode(rendered, add_special_tokens=False, separator=separator)

        ids = render() if max_document_tokens is None else []
        if max_document_tokens is None and (limit is None or len(ids) <= limit.max_tokens):
            return EncodedInput(ids, second_start=len(ids))
        tokens += [self._encode_separated(text, separator, add_special_tokens=False) for text in texts]
        first, second = map(len, tokens)
        is_truncated = max_document_tokens is not None and second > max_document_tokens
        if max_document_tokens is not None:
            second = min(second, max_document_tokens)
            ids = render(first, second)
        if limit is not None and len(ids) > limit.max_tokens:
            ids, is_truncated = fit_pair(ids, render, first, second, limit), True
        return EncodedInput(ids, is_truncated, len(ids))

    def separate_contents(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> SeparatedContents | None:
        """Return the inputs of the chat template with separators in their control tokens; None if they have none.

        Raises:
            ChatTemplateError: they cannot be separated.
        """
        try:
            return self.control_tokens.separate(messages, tools or [], variables or {})
        except ValueError as exc:
            raise ChatTemplateError(str(exc)) from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD."""
        return str(self._core.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def mark_id(self, mark: str) -> int | None:
        """Return the id of a mark of tool calls or reasoning; None if the mark is no token of its own."""
        token_id: int | None = self._core.token_to_id(mark)
        return token_id if token_id in self._core.get_added_tokens_decoder() else None

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        return str(self._core.to_str())

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        budget: WorkBudget | None = None,
    ) -> str:
        """Return the prompt's text for `messages`, rendered with the model's chat template and further variables.

        Args:
            budget: the work that the rendering may use; None: an amount in proportion to the input.

        Raises:
            ChatTemplateError: the model has no template, or the template cannot render these messages.
            ChatTemplateWorkError: the template needs more work than its budget.
        """
        if self._chat is None:
            raise ChatTemplateError("this model has no chat template; use plain completions")
        return self._chat.render(messages, tools, add_generation_prompt, variables or {}, budget)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the prompt's ids for `messages`. Raises as `render_chat` does."""
        return self.encode(self.render_chat(messages, tools, add_generation_prompt), add_special_tokens=False)

    def probe_template(self) -> TemplateTraits:
        """Return the forms of conversations that the chat template takes. It is probed in the first call."""
        if self.template_traits is None:
            self.template_traits = TemplateTraits() if self._chat is None else probe_template(self._chat)
        return self.template_traits

    @property
    def template_takes_tools(self) -> bool:
        """Return whether the chat template includes tools in the prompt."""
        return self._chat is not None and self._chat.takes_tools

    def detokenizer(
        self, params: SamplingParams, splitter: ReasoningSplitter | None = None, *, continues: bool = False
    ) -> Detokenizer:
        """Return a detokenizer for one output.

        Args:
            continues: the output continues the prompt's text.
        """
        text = self if params.skip_special_tokens else _SpecialTokenText(self)
        include_stop = params.include_stop_str_in_output
        return Detokenizer(text, params.stop, splitter, include_stop=include_stop, continues=continues)

    def is_continued(self, prompt: Sequence[int]) -> bool:
        """Return whether an output continues the text of a prompt. After a special token it begins a text."""
        return bool(prompt) and prompt[-1] not in self._special_ids

    @property
    def has_chat_template(self) -> bool:
        """Return whether messages can be rendered."""
        return self._chat is not None

    @property
    def kind(self) -> str:
        """Return the algorithm, such as "BPE (bytes)", "Unigram" or "WordPiece"."""
        name = type(self._core.model).__name__
        return f"{name} (bytes)" if self.is_byte_level else name

    @property
    def is_byte_level(self) -> bool:
        """Return whether a text is the concatenation of its tokens' bytes, so that tokens can be decoded one by one."""
        return isinstance(self._core.decoder, tokenizers.decoders.ByteLevel)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the UTF-8 bytes of one token; empty for special and unknown tokens. Requires `is_byte_level`."""
        table = self._bytes_table
        return table[token_id] if 0 <= token_id < len(table) else b""

    def spell(self, token_id: int, *, begins_text: bool = False) -> bytes:
        """Return the UTF-8 bytes of one token for display; for a special token, of its name.

        Args:
            begins_text: the token begins a text, whose first space a decoder may omit.
        """
        if self.is_byte_level and token_id not in self._special_ids:
            return self.token_bytes(token_id) or b""
        if (byte := self._byte_of(token_id)) is not None:
            return bytes([byte])
        if begins_text or token_id in self._special_ids:
            return self.decode([token_id], skip_special_tokens=False).encode()
        before, text = (
            self.decode(ids, skip_special_tokens=False) for ids in (self.neutral_ids, [*self.neutral_ids, token_id])
        )
        return text[len(before) :].encode()

    def is_byte(self, token_id: int) -> bool:
        """Return whether a token is a single byte, in a tokenizer with other tokens for most characters."""
        return self._byte_of(token_id) is not None

    def _byte_of(self, token_id: int) -> int | None:
        name = self._core.id_to_token(token_id) or ""
        match = _BYTE_TOKEN.fullmatch(name)
        # Without a decoder of bytes, it is a token like others.
        return None if match is None or self.decode([token_id]) == name else int(match.group(1), 16)

    def _find_neutral_ids(self) -> tuple[int, ...]:
        """Return the ids of a text of one letter."""
        found = map(self._core.token_to_id, string.ascii_letters)
        first = next((token_id for token_id in found if token_id is not None), None)
        return () if first is None else (first,)

    def _measure_longest_token(self) -> int:
        """Return the UTF-8 length of the longest token. A text has at least its length divided by this many tokens."""
        lengths = [len(token) for token in self._bytes_table]
        if not self.is_byte_level:
            lengths = [len(text.encode()) for text in self._core.get_vocab(with_added_tokens=True)]
        added = (len(token.content.encode()) for token in self._core.get_added_tokens_decoder().values())
        return max(*lengths, *added, 1, 1)

    def _make_bytes_table(self) -> list[bytes]:
        alphabet = byte_alphabet()
        table: list[bytes] = []
        size = max(self._core.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        for token_id in range(size):
            text = self._core.id_to_token(token_id)
            if text is None or token_id in self._special_ids:
                table.append(b"")
            elif all(char in alphabet for char in text):
                table.append(bytes(alphabet[char] for char in text))
            else:
                table.append(text.encode())
        return table


class _SpecialTokenText:
    """The text of tokens with that of special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.is_byte_level = tokenizer.is_byte_level
        self.neutral_ids = tokenizer.neutral_ids
        self.token_bytes = tokenizer.spell
        self.is_byte = tokenizer.is_byte

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _cut(text: str, tokens: Sequence[tuple[int, int, int]], room: int, *, keeps_end: bool) -> str:
    """Return the part of a text that has at most this many of its tokens, whose starts and ends are given."""
    if len(tokens) <= room:
        return text
    if not room:
        return ""
    return text[tokens[-room][1] :] if keeps_end else text[: tokens[room - 1][2]]


def byte_alphabet() -> dict[str, int]:
    """Return the printable characters by which byte-level BPE writes the 256 bytes."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(others)}


def read_core(path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer in the file tokenizer.json.

    Raises:
        ModelError: the file is missing, too large or damaged.
    """
    if not path.is_file():
        raise ModelError(
            f"{path}: no such file; want it, or a tokenizer.model, sentencepiece.bpe.model, .tiktoken file, "
            "vocab.json with merges.txt, or vocab.txt"
        )
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelError(f"{path}: too large for a tokenizer")
    try:
        return _with_visible_marks(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as exc:  # noqa: BLE001 - the library raises plain Exception for damaged files
        raise ModelError(f"{path}: {exc}") from None


def _with_visible_marks(core: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return the tokenizer with marks of tool calls and reasoning as ordinary tokens, which decoding includes."""
    added = core.get_added_tokens_decoder().values()
    if not any(token.special and token.content in MARK_TOKENS for token in added):
        return core
    data = json.loads(core.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in MARK_TOKENS
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):  # an AddedToken, written out
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        if path.stat().st_size > 1 << 20:
            raise ModelError(f"{path}: too large for a chat template")
        return path.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
