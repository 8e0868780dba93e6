"""The separation of a completion's text into reasoning and answer. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from inference_worker.contract.output_formats import ReasoningFormat


class ReasoningState(Enum):
    POSSIBLE = "possible"  # the output so far may be the mark that begins the reasoning
    OPEN = "open"
    ENDED = "ended"  # the rest is the answer; also if the output has no reasoning


class ReasoningSplitter:
    """The separation of one completion's text, as it arrives. The result does not depend on how the text is split.

    Marks are removed, and whitespace around the reasoning and before the answer.

    Args:
        is_open: whether the prompt has begun the reasoning.
        has_grammar: whether the answer has a grammar, which begins after the mark that ends the reasoning.
    """

    def __init__(self, form: ReasoningFormat, *, is_open: bool, has_grammar: bool = False) -> None:
        self._format = form
        self._has_grammar = has_grammar
        self._answer_marks = () if has_grammar else form.answer_marks
        self._pending = ""
        self._is_first = True  # no text of the current part has been returned
        self._had_reasoning = is_open
        self.state = ReasoningState.OPEN if is_open else ReasoningState.POSSIBLE

    def push(self, text: str) -> tuple[str, str]:
        """Return the new text of the reasoning, and the new text of the answer."""
        self._pending += text
        reasoning = ""
        if self.state is ReasoningState.POSSIBLE:
            self._find_start()
        if self.state is ReasoningState.OPEN:
            reasoning = self._read_reasoning()
        return reasoning, self._read_answer() if self.state is ReasoningState.ENDED else ""

    def close(self, *, is_truncated: bool = False) -> str:
        """Return the remaining text of the answer at the end of the completion.

        Args:
            is_truncated: whether the length limit has ended the completion, so that it may end within a mark.
        """
        text, self._pending = self._pending, ""
        if self.state is ReasoningState.OPEN:
            return ""  # whitespace, or a part of the mark that ends the reasoning
        marks = self._format.starts if self.state is ReasoningState.POSSIBLE else self._answer_marks
        is_part = is_truncated and bool(text.strip()) and any(mark.startswith(text.strip()) for mark in marks)
        return "" if is_part or (self._had_reasoning and not text.strip()) else text

    def skip_reasoning(self) -> None:
        """Treat the rest of the text as the answer."""
        self.state, self._is_first = ReasoningState.ENDED, False

    def _find_start(self) -> None:
        text = self._pending.lstrip()
        for mark in self._format.starts:
            if text.startswith(mark):
                self._pending = text[len(mark) :]
                self.state, self._had_reasoning = ReasoningState.OPEN, True
                return
        if not any(mark.startswith(text) for mark in self._format.starts):
            self.skip_reasoning()

    def _read_reasoning(self) -> str:
        """Return the new text of the reasoning. Text that may be part of a mark, and whitespace, is withheld."""
        if self._is_first:
            self._pending = self._pending.lstrip()
        found = min(((at, mark) for mark in self._format.ends if (at := self._pending.find(mark)) >= 0), default=None)
        if found is not None:
            text = self._pending[: found[0]].rstrip()
            # The grammar does not include the rest of the token that has ended the reasoning.
            self._pending = "" if self._has_grammar else self._pending[found[0] + len(found[1]) :]
            self.state, self._is_first = ReasoningState.ENDED, True
            return text
        text = self._pending[: len(self._pending) - beginning_length(self._pending, self._format.ends)].rstrip()
        self._pending = self._pending[len(text) :]
        self._is_first = self._is_first and not text
        return text

    def _read_answer(self) -> str:
        if self._is_first:
            self._pending = self._pending.lstrip()
        if self._had_reasoning:
            for mark in self._answer_marks:
                self._pending = self._pending.replace(mark, "")
            if self._is_first:
                self._pending = self._pending.lstrip()
        withheld = beginning_length(self._pending, self._answer_marks) if self._had_reasoning else 0
        text = self._pending[: len(self._pending) - withheld]
        self._pending = self._pending[len(text) :]
        self._is_first = self._is_first and not text
        return text


def beginning_length(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of one of the marks."""
    longest = max(map(len, marks), default=0)
    for length in range(min(len(text), longest - 1), 0, -1):
        suffix = text[-length:]
        if any(len(mark) > length and mark.startswith(suffix) for mark in marks):
            return length
    return 0
