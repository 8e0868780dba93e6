"""Inputs of encoders as token ids: texts, pairs of texts, and their truncation. Does not import torch.

Inputs are truncated as by sentence-transformers: the special tokens at both ends stay, and of a pair the longer text
loses tokens first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import tokenizers

MAX_RENDERINGS = 4  # renderings of a truncated pair in its chat template


@dataclass(frozen=True, slots=True)
class InputLimit:
    """The maximum tokens of an input, and which end of a longer text is dropped."""

    max_tokens: int
    keeps_end: bool = False  # drops the beginning instead of the end

    @property
    def direction(self) -> Literal["left", "right"]:
        return "left" if self.keeps_end else "right"


class EncodedInput(NamedTuple):
    """The token ids of an input."""

    ids: list[int]
    is_truncated: bool = False
    second_start: int = 0  # pairs: position of the first token of type 1; the length if there is one token type


class InputTooLong(Exception):
    """Raised if an input cannot be truncated to its limit, which has no room for a text."""


class InputEncoder:
    """The encoder of texts and pairs of texts with the special tokens of a tokenizer."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self._core = core

    def encode_text(self, text: str, limit: InputLimit) -> EncodedInput:
        """Return the ids of a text.

        Raises:
            InputTooLong: the limit has no room for a text.
        """
        room = self._room(limit, is_pair=False)
        encoding = self._encode(text)
        is_truncated = _truncate(encoding, room, limit.direction)
        return EncodedInput(list(self._core.post_process(encoding).ids), is_truncated)

    def truncate_ids(self, ids: list[int], limit: InputLimit) -> EncodedInput:
        """Return the ids of a text that is already tokenized. Special tokens at its ends stay.

        Raises:
            InputTooLong: the limit has no room for a text.
        """
        if len(ids) <= limit.max_tokens:
            return EncodedInput(ids)
        self._room(limit, is_pair=False)
        head, tail = self._special_ends
        head = head if ids[: len(head)] == head else []
        tail = tail if tail and ids[-len(tail) :] == tail else []
        room = limit.max_tokens - len(head) - len(tail)
        inner = ids[len(head) : len(ids) - len(tail)]
        return EncodedInput([*head, *(inner[-room:] if limit.keeps_end else inner[:room]), *tail], is_truncated=True)

    def encode_pair(
        self, first: str, second: str, limit: InputLimit | None = None, max_second_tokens: int | None = None
    ) -> EncodedInput:
        """Return the ids of two texts in the form of a cross-encoder's input.

        Args:
            max_second_tokens: maximum tokens of the second text; None: no maximum.

        Raises:
            InputTooLong: the limit has no room for a pair.
        """
        direction = "right" if limit is None else limit.direction
        head, tail = self._encode(first), self._encode(second)
        is_truncated = max_second_tokens is not None and _truncate(tail, max_second_tokens, direction)
        if limit is not None:
            rooms = share_room(len(head), len(tail), self._room(limit, is_pair=True))
            for encoding, room in zip((head, tail), rooms, strict=True):
                is_truncated = _truncate(encoding, room, direction) or is_truncated
        pair = self._core.post_process(head, tail)
        types = pair.type_ids
        return EncodedInput(list(pair.ids), is_truncated, types.index(1) if 1 in types else len(types))

    def _encode(self, text: str) -> tokenizers.Encoding:
        (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=False)  # releases the GIL
        return encoding

    def _room(self, limit: InputLimit, *, is_pair: bool) -> int:
        """Return the tokens that a limit leaves for texts."""
        special = self._core.num_special_tokens_to_add(is_pair)
        if limit.max_tokens <= special:
            raise InputTooLong(f"{special} of the tokens are special tokens")
        return limit.max_tokens - special

    @cached_property
    def _special_ends(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        encoding = self._core.encode("a")
        inner = [place for place, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
        if not inner:
            return [], []
        return list(encoding.ids[: inner[0]]), list(encoding.ids[inner[-1] + 1 :])


def share_room(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the tokens that two texts keep of their lengths: the longer one loses tokens first.

    This is the strategy longest_first of the library tokenizers.
    """
    if first + second <= room:
        return first, second
    half = room // 2
    if first <= half:
        return first, room - first
    if second <= half:
        return room - second, second
    # The library gives the odd token to the longer text, or to the second of equal ones.
    return (half, room - half) if first <= second else (room - half, half)


def fit_pair(
    ids: list[int], render: Callable[[int, int], list[int]], first: int, second: int, limit: InputLimit
) -> list[int]:
    """Return the ids of a rendered pair whose texts are truncated to a limit.

    Args:
        ids: of the pair without truncation.
        render: returns the ids of the pair with at most these tokens of the first and of the second text.
        first: tokens of the first text.
        second: tokens of the second text.

    Raises:
        InputTooLong: the template leaves no room for the texts.
    """
    room = limit.max_tokens - (len(ids) - first - second)
    for _ in range(MAX_RENDERINGS):
        if room < 1:
            break
        ids = render(*share_room(first, second, room))
        if len(ids) <= limit.max_tokens:
            return ids
        room -= len(ids) - limit.max_tokens  # a text that is cut may have other tokens at its end
    raise InputTooLong("the template leaves no room for the texts")


def _truncate(encoding: tokenizers.Encoding, room: int, direction: Literal["left", "right"]) -> bool:
    """Truncate an encoding in place. Return whether it was longer."""
    if len(encoding) <= room:
        return False
    encoding.truncate(room, direction=direction)
    return True
