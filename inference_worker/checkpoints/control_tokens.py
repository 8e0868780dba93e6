"""Control tokens in the contents of conversations: they are tokenized as text, so that no content can forge a turn.

A separator is inserted after the first character of each control token's text in the contents, before the chat template
is rendered. So no control token matches there. The separator's own tokens are removed after tokenization.

A separator is a printable character that the contents do not have. It survives what templates do with texts, such as
trimming, splitting and JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import tokenizers

from inference_worker.contract.output_formats import MARK_TOKENS

SEPARATORS = tuple(map(chr, range(0x1D300, 0x1D357)))  # symbols of four bytes, which are rarely used
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")  # ASCII texts are unchanged by them
_MARKED_FIELDS = ("content", "reasoning_content")  # fields of an answer in which marks stay
_ROLES = frozenset({"assistant", "developer", "end", "function", "model", "system", "tool", "user"})
_encode = msgspec.json.Encoder().encode
_Trie = dict[str, "_Trie"]


class SeparatedContents(NamedTuple):
    """The inputs of a chat template with separators in their control tokens."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    variables: Mapping[str, Any]
    separator: str

    def restore(self, text: str) -> str:
        """Return the rendered text with plain separators where the template has escaped them in JSON."""
        return text.replace(_escape(self.separator), self.separator)


class ControlTokens:
    """The control tokens of a tokenizer and its chat template.

    These are the special tokens, the marks of tool calls and reasoning, those with a role's name, and other added
    tokens that are in the template's source. White space and single characters are none. Nor are words, unless they are
    special.
    """

    def __init__(self, core: tokenizers.Tokenizer, chat_template: str | None) -> None:
        added = [
            token
            for token in core.get_added_tokens_decoder().values()
            if _is_control(token, chat_template or "") and len(token.content) > 1 and not token.content.isspace()
        ]
        self.texts = frozenset(token.content for token in added)
        self._all = _compile(self.texts)
        self._without_marks = _compile(self.texts - MARK_TOKENS)
        # Find them in the JSON of the contents, which has a fixed text for each character. A pattern with one first
        # character is found faster.
        self._in_json = [re.compile(pattern) for pattern in _patterns(map(_escaped_bytes, self.texts))]
        self._normalize: Callable[[str], str] | None = None
        if type(core.normalizer).__name__ in _NORMALIZERS and any(token.normalized for token in added):
            self._normalize = core.normalizer.normalize_str

    def separate(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], variables: Mapping[str, Any]
    ) -> SeparatedContents | None:
        """Return the inputs of a chat template with separators; None if they have no control tokens.

        The assistant's texts keep the marks of tool calls and reasoning.

        Raises:
            ValueError: they are nested too deeply, or have each of the separators.
        """
        try:
            encoded = _encode_all((messages, tools, variables))
            if not self._occur(encoded):
                return None
            separator = _find_separator(encoded.decode("utf-8", "surrogatepass"))
            separated = [self._separate_message(message, separator) for message in messages]
            return SeparatedContents(
                separated,
                self._separate(tools, self._all, separator),
                self._separate(variables, self._all, separator),
                separator,
            )
        except RecursionError:
            raise ValueError("the messages or tools are nested too deeply") from None

    def _occur(self, encoded: bytes) -> bool:
        text = encoded.decode("latin-1")
        if any(pattern.search(text) for pattern in self._in_json):
            return True
        if self._normalize is None or encoded.isascii():
            return False
        return self._all.search(self._normalize(encoded.decode("utf-8", "replace"))) is not None

    def _separate_message(self, message: dict[str, Any], separator: str) -> dict[str, Any]:
        is_own = message.get("role") == "assistant"
        return {
            name: self._separate(
                value, self._without_marks if is_own and name in _MARKED_FIELDS else self._all, separator
            )
            for name, value in message.items()
        }

    def _separate(self, value: Any, pattern: re.Pattern[str], separator: str) -> Any:
        if isinstance(value, str):
            if self._normalize is not None and not value.isascii():
                normalized = self._normalize(value)
                value = normalized if pattern.search(normalized) else value
            return pattern.sub(rf"\g<0>{separator}", value)
        if isinstance(value, Mapping):
            return {
                self._separate(name, pattern, separator): self._separate(item, pattern, separator)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._separate(item, pattern, separator) for item in value]
        return value


def _is_control(token: tokenizers.AddedToken, template: str) -> bool:
    text = token.content
    if token.special or text in MARK_TOKENS:
        return True
    if text.strip("<|>[]/") in _ROLES and text not in _ROLES:  # a template may write these around the message's role
        return True
    return text in template and any(not char.isalnum() and not char.isspace() for char in text)


def _compile(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the first character of each of the texts, also where they overlap."""
    return re.compile("|".join(_patterns(texts)) or r"(?!)")


def _patterns(texts: Iterable[str]) -> list[str]:
    """Return such patterns, one for each first character."""
    trie: _Trie = {}
    for text in texts:
        node = trie
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return [f"{re.escape(first)}(?={_pattern(rest)})" for first, rest in sorted(trie.items())]


def _pattern(trie: _Trie) -> str:
    common = ""
    while len(trie) == 1 and "" not in trie:
        ((char, trie),) = trie.items()
        common += re.escape(char)
    if "" in trie:  # longer texts with this beginning need no pattern of their own
        return common
    alternatives = [re.escape(char) + _pattern(rest) for char, rest in sorted(trie.items())]
    return f"{common}(?:{'|'.join(alternatives)})"


def _escape(text: str) -> str:
    return json.dumps(text)[1:-1]


def _escaped_bytes(text: str) -> str:
    """Return the bytes of the text in JSON, as characters up to U+00FF."""
    return _encode(text)[1:-1].decode("latin-1")


def _encode_all(values: Any) -> bytes:
    try:
        return _encode(values)
    except (OverflowError, UnicodeError):  # an integer of more than 64 bits, or half of a surrogate pair
        return json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _find_separator(encoded: str) -> str:
    """Return a separator that is not in the contents, neither plain nor escaped in JSON."""
    plain = encoded.replace(r"\\", "\\").lower()
    for separator in SEPARATORS:
        if separator not in plain and _escape(separator) not in plain:
            return separator
    raise ValueError("the messages have control tokens and every one of the symbols from U+1D300 to U+1D356")
