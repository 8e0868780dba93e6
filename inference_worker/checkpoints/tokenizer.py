"""Tokenizers: text to token ids and back, and chat messages to prompts. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from inference_worker.checkpoints.chat_template import ChatTemplate, ChatTemplateError
from inference_worker.checkpoints.detokenizer import Detokenizer
from inference_worker.checkpoints.model_config import ModelError, read_json, token_ids
from inference_worker.checkpoints.reasoning import ReasoningSplitter
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


class Tokenizer:
    """A model's tokenizer: `tokenizer.json`, with the special tokens and the chat template of tokenizer_config.json."""

    # Whether small prompts were measured to be rendered with little work; None: not measured.
    is_template_cheap: bool | None = None

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
        self.eos_token_ids = eos_token_ids
        self.model_max_length = model_max_length
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        added = core.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes_table = self._make_bytes_table() if self.is_byte_level else []
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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`.

        `add_special_tokens` adds a beginning-of-text token if the model uses one.
        """
        # A batch of one, because `encode` does not release the GIL, for seconds if the text is long.
        (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_pair(self, first: str, second: str, max_second_tokens: int | None = None) -> tuple[list[int], int]:
        """Return the ids of two texts in the form of a cross-encoder's input, and the position of the second text.

        `max_second_tokens` truncates the second text. The position is the first token of type 1, or the length if the
        tokenizer has one token type.
        """
        head, tail = (self._core.encode_batch_fast([text], add_special_tokens=False)[0] for text in (first, second))
        if max_second_tokens is not None:
            tail.truncate(max_second_tokens)
        pair = self._core.post_process(head, tail)
        types = pair.type_ids
        return list(pair.ids), types.index(1) if 1 in types else len(types)

    def encode_rendered_pair(
        self,
        instruction: str,
        query: str,
        document: str,
        max_document_tokens: int | None = None,
        budget: WorkBudget | None = None,
    ) -> list[int]:
        """Return the ids of a pair of texts in the chat template, with the roles query and document.

        Args:
            instruction: the system message; empty: none.
            max_document_tokens: truncates the document.
            budget: as for `render_chat`.

        Raises:
            ChatTemplateError: the template cannot render the pair.
        """
        if max_document_tokens is not None:
            (encoding,) = self._core.encode_batch([document], add_special_tokens=False)
            if len(encoding) > max_document_tokens:
                document = document[: encoding.offsets[max_document_tokens - 1][1]]
        messages = [{"role": "system", "content": instruction}] if instruction else []
        messages += [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return self.encode(self.render_chat(messages, budget=budget), add_special_tokens=False)

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

    @property
    def template_takes_tools(self) -> bool:
        """Return whether the chat template includes tools in the prompt."""
        return self._chat is not None and self._chat.takes_tools

    def detokenizer(self, params: SamplingParams, splitter: ReasoningSplitter | None = None) -> Detokenizer:
        """Return a detokenizer for one output."""
        text = self if params.skip_special_tokens else _SpecialTokenText(self)
        return Detokenizer(text, params.stop, splitter, include_stop=params.include_stop)

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

    def spell(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token for display; for a special token, of its name."""
        if token_id in self._special_ids or not self.is_byte_level:
            return self.decode([token_id], skip_special_tokens=False).encode()
        return self.token_bytes(token_id) or b""

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
        self.token_bytes = tokenizer.spell

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


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
