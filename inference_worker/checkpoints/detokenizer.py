"""Incremental detokenization: text is returned without partial characters and without beginnings of stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from inference_worker.checkpoints.reasoning import ReasoningSplitter


class TokenText(Protocol):
    """The methods of a tokenizer that a detokenizer uses."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the UTF-8 bytes of one token, or None if the token's text depends on its neighbors."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""

    @property
    def is_byte_level(self) -> bool:
        """Return whether `token_bytes` is defined for every token."""

    @property
    def neutral_ids(self) -> Sequence[int]:
        """Return a text's ids that do not change the text of following tokens, except that these begin no text."""

    def is_byte(self, token_id: int) -> bool:
        """Return whether the token is a single byte. Such tokens in a row are decoded together."""


# Four bytes make the longest character, so no honest text leaves more than three tokens waiting for their character.
_MAX_PENDING_TOKENS = 8


class Detokenizer:
    """The incremental detokenizer of one request. Its result is that of one `decode` over all tokens.

    `push` returns the text that cannot change any more. The text ends before the stop string, or after it with
    `include_stop`. `flush` returns the rest after the last token. With a
    `splitter`, both return only the answer's text, and `reasoning` is the reasoning's text of the last call.
    With `continues`, the tokens continue a text, so the first one keeps a space that a decoder omits from the beginning
    of a text.
    """

    def __init__(
        self,
        tokenizer: TokenText,
        stop: Sequence[str] = (),
        splitter: ReasoningSplitter | None = None,
        *,
        include_stop: bool = False,
        continues: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        # Recent tokens, because a token's text can depend on its neighbors.
        self._ids = list(tokenizer.neutral_ids) if continues and self._utf8 is None else []
        self._read = len(self._ids)  # number of recent tokens whose text was returned
        self._stop = tuple(s for s in stop if s)
        self._include_stop = include_stop
        self._splitter = splitter
        self.reasoning = ""
        self._withheld = ""
        self._may_stop = True
        self.stopped_by: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Return the text that became final with this token; after a stop string, always the empty text.

        A stop string counts if `may_stop` is true when its last character becomes final.
        """
        self.reasoning = ""
        if self.stopped_by is not None:
            return ""
        self._may_stop = may_stop
        if self._utf8 is None:
            return self._release(self._push_window(token_id))
        raw = self._tokenizer.token_bytes(token_id)
        return self._release(self._utf8.decode(raw) if raw else "")

    def flush(self, *, is_truncated: bool = False) -> str:
        """Return the withheld text after the last token. `is_truncated`: the length limit has ended the output."""
        self.reasoning = ""
        if self.stopped_by is not None:
            return ""
        if self._utf8 is not None:
            text = self._utf8.decode(b"", True)
        else:
            text = self._window_text()
            self._read = len(self._ids)
        text = self._release(text, is_last=True, is_truncated=is_truncated)
        text, self._withheld = text + self._withheld, ""
        return text

    def _push_window(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._window_text()
        if text.endswith("\ufffd") and len(self._ids) - self._read < _MAX_PENDING_TOKENS:
            return ""
        # The tokens whose text was returned stay as context. The context starts where a text was complete, so that it
        # does not start within a character. It has no bytes, since a byte that is no character's would change theirs.
        # Tokens that are not in the text, such as special ones, do not replace it.
        if text and self._tokenizer.is_byte(token_id):
            self._ids = list(self._tokenizer.neutral_ids)
        elif text:
            self._ids = self._ids[self._read :]
        elif len(self._ids) > _MAX_PENDING_TOKENS:
            self._ids.pop()
        self._read = len(self._ids)
        return text

    def _window_text(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._read])
        return self._tokenizer.decode(self._ids)[len(before) :]

    def _release(self, text: str, *, is_last: bool = False, is_truncated: bool = False) -> str:
        """Append `text` to the withheld text and return the part that cannot belong to a stop string."""
        if self._splitter is not None:
            self.reasoning, text = self._splitter.push(text)
            if is_last:
                text += self._splitter.close(is_truncated=is_truncated)
        if not self._stop:
            return text
        old = len(self._withheld)
        text = self._withheld + text
        # The withheld text may contain a stop string that did not count. A new one must end in the new text.
        found = min(((at, s) for s in self._stop if (at := text.find(s, max(0, old - len(s) + 1))) >= 0), default=None)
        if found is not None and self._may_stop:
            self._withheld, self.stopped_by = "", found[1]
            return text[: found[0] + len(found[1]) * self._include_stop]
        overlap = max(_overlap(text, s) for s in self._stop)
        self._withheld = text[len(text) - overlap :]
        return text[: len(text) - overlap]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
