"""Token ids to text, one at a time: never half a character, never the beginning of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenText(Protocol):
    """What a detokenizer needs to know of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """UTF-8 of one token where a text is its tokens' bytes in a row; None where it is not so simple."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens left out."""

    @property
    def is_byte_level(self) -> bool:
        """Whether `token_bytes` answers for every token."""


# Four bytes make the longest character, so no honest text leaves more than three tokens waiting for their character.
_MAX_PENDING_TOKENS = 8


class Detokenizer:
    """Turns one request's tokens to text, as one call of `decode` over all of them would.

    `push` returns the text that is certain now; `flush` the rest when no token will follow.
    """

    def __init__(self, tokenizer: TokenText, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        self._ids: list[int] = []  # the window of the slow way: a token's text can depend on its neighbors
        self._read = 0  # of the window, the tokens whose text is out
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self._may_stop = True
        self.stopped_by: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Return the text that became certain with this token. After a stop string was met, the empty text.

        A stop string counts if `may_stop` holds where its last character becomes certain.
        """
        if self.stopped_by is not None:
            return ""
        self._may_stop = may_stop
        if self._utf8 is None:
            return self._release(self._push_window(token_id))
        raw = self._tokenizer.token_bytes(token_id)
        return self._release(self._utf8.decode(raw) if raw else "")

    def flush(self) -> str:
        """Return what was held back: the answer is over, so it was no stop string and no half character."""
        if self.stopped_by is not None:
            return ""
        if self._utf8 is not None:
            text = self._release(self._utf8.decode(b"", True))
        else:
            text = self._release(self._window_text())
            self._read = len(self._ids)
        text, self._held = text + self._held, ""
        return text

    def _push_window(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._window_text()
        if text.endswith("\ufffd") and len(self._ids) - self._read < _MAX_PENDING_TOKENS:
            return ""
        # The tokens whose text is out now stay as context. They begin where a text was whole: cut anywhere else, the
        # window could begin within a character.
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return text

    def _window_text(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._read])
        return self._tokenizer.decode(self._ids)[len(before) :]

    def _release(self, text: str) -> str:
        """Add `text` to what is held; return what can be no part of a stop string any more."""
        if not self._stop:
            return text
        old = len(self._held)
        text = self._held + text
        # What was held back may contain a whole stop string, met where none counted: a new one ends in the new text.
        found = min(((at, s) for s in self._stop if (at := text.find(s, max(0, old - len(s) + 1))) >= 0), default=None)
        if found is not None and self._may_stop:
            self._held, self.stopped_by = "", found[1]
            return text[: found[0]]
        hold = max(_overlap(text, s) for s in self._stop)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, shorter than it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
