"""Drafts from the sequence's own tokens: the continuation of the longest match of its last tokens.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from inference_worker.engine.sequences.sequence import Sequence
from inference_worker.engine.speculation.drafter import MAX_DEPTH, MAX_EVIDENCE, DraftToken

MIN_MATCH = 2  # tokens
_SEPARATOR = -1  # between the predicted output and the prompt


class PromptLookup:
    """A drafter that searches the prompt, the output and the request's predicted output.

    The search compares the last token with all tokens and narrows the places by the tokens before. It needs 4 bytes for
    each token and no index, and is linear in the tokens with a small factor: 0.03 ms for 8,192 tokens.
    """

    name = "lookup"

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Sequence, _SearchText] = WeakKeyDictionary()

    def propose(self, seq: Sequence, drafts: Items[int], limit: int) -> list[DraftToken]:
        text = self._texts.get(seq)
        if text is None:
            text = self._texts[seq] = _SearchText(seq)
        text.update(seq)
        return text.propose(drafts, limit)


class _SearchText:
    """The searched tokens of one sequence, and the place of the last match.

    While the output follows a match, the next search is not necessary.
    """

    def __init__(self, seq: Sequence) -> None:
        prediction = seq.request.prediction
        start = [*prediction, _SEPARATOR] if prediction else []
        self._tokens: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._length = self._num_taken = 0
        self._append(start)
        # A predicted output is expected to be the output, from its first token on.
        self._place: int | None = None
        self._match = 0  # tokens before the place that are equal to the last tokens
        self._append(seq.tokens[: seq.num_prompt_tokens])
        self._num_taken = seq.num_prompt_tokens
        if prediction:
            self._place, self._match = 0, MAX_EVIDENCE

    def update(self, seq: Sequence) -> None:
        """Append the sequence's new tokens."""
        if self._num_taken == len(seq.tokens):
            return
        for token_id in seq.tokens[self._num_taken :]:
            if self._place is not None:
                if self._tokens[self._place] == token_id:
                    self._place += 1
                    self._match += 1
                else:
                    self._place = None
            self._append([token_id])
        self._num_taken = len(seq.tokens)

    def propose(self, drafts: Items[int], limit: int) -> list[DraftToken]:
        length = self._length
        if drafts:
            self._append(drafts)
            place, match = self._search()
            self._length = length
        else:
            if self._place is None:
                self._place, self._match = self._search()
            place, match = self._place, self._match
        if place is None:
            return []
        found: list[DraftToken] = []
        end = length + len(drafts)
        for index in range(place, place + limit):
            # A repetition that reaches the end continues with its own drafts.
            token_id = int(self._tokens[index]) if index < end else found[index - end].token_id
            if token_id == _SEPARATOR:
                break
            found.append(DraftToken(token_id, PromptLookup.name, min(match + len(found), MAX_EVIDENCE)))
        return found

    def _search(self) -> tuple[int | None, int]:
        """Return the place after the latest of the longest matches of the last tokens, and the match's length."""
        tokens, last = self._tokens[: self._length], self._length - 1
        places = np.flatnonzero(tokens[:last] == tokens[last])
        match = 1 if len(places) else 0
        while 0 < match < MAX_EVIDENCE and match <= last:
            longer = places[places >= match]
            longer = longer[tokens[longer - match] == tokens[last - match]]
            if not len(longer):
                break
            places, match = longer, match + 1
        return (int(places[-1]) + 1, match) if match >= MIN_MATCH else (None, 0)

    def _append(self, token_ids: Items[int]) -> None:
        length = self._length + len(token_ids)
        if length > len(self._tokens):
            tokens = np.empty(max(2 * len(self._tokens), length + 16 * MAX_DEPTH), dtype=np.int32)
            tokens[: self._length] = self._tokens[: self._length]
            self._tokens = tokens
        self._tokens[self._length : length] = token_ids
        self._length = length
