"""The reasoning of one output: its tokens, its budget, and the start of the answer's grammar. Does not import torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import numpy as np

from inference_worker.checkpoints.reasoning import ReasoningSplitter, ReasoningState
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.output_formats import REASONING_FORMATS
from inference_worker.contract.request import ReasoningSpec, RequestRejected, TokenLogprobs
from inference_worker.engine.structured_output.grammars import Masks


class ReasoningTracker:
    """The state of one output's reasoning. Tokens are never removed, so a preempted output continues at its state.

    When the budget is used up, the next tokens are forced: those of the text that ends the reasoning.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: width of the masks in bits, as of the grammars' masks.
        eos_token_ids: ids that must not end the reasoning if a grammar follows.
    """

    def __init__(
        self,
        spec: ReasoningSpec,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        has_grammar: bool,
    ) -> None:
        form = REASONING_FORMATS.get(spec.format)
        if form is None:
            raise RequestRejected("invalid_value", f"there is no reasoning format {spec.format!r}", "reasoning")
        self.splitter = ReasoningSplitter(form, is_open=spec.is_open, has_grammar=has_grammar)
        self._budget = spec.budget
        self._vocab_size = vocab_size
        self._eos = [token for token in eos_token_ids if token < vocab_size]
        self._has_grammar = has_grammar
        end = form.forced_end
        if has_grammar:  # which begins directly after the mark
            end = end[: end.index(form.ends[0]) + len(form.ends[0])]
        self._end_ids = tokenizer.encode(end, add_special_tokens=False)
        start_ids = tokenizer.encode(form.starts[0], add_special_tokens=False)
        self._start_id = start_ids[0] if len(start_ids) == 1 else None
        self._forced: deque[int] = deque()
        self._used = 0  # tokens of the reasoning, without marks
        self._uncounted = 0  # tokens that may turn out to be the mark that begins the reasoning
        self._logprobs: list[TokenLogprobs] = []  # log-probabilities of these tokens
        if has_grammar and not spec.is_open and self._start_id is None:
            # Without a token for the mark, a grammar cannot leave the choice to the model.
            if spec.is_requested:
                self._forced.extend(start_ids)
            else:
                self.splitter.skip_reasoning()
        self._force_end_if_due()

    @property
    def has_ended(self) -> bool:
        """Return whether the answer has begun, so that no token of the reasoning can follow."""
        return not self._forced and self.splitter.state is ReasoningState.ENDED

    @property
    def grammar_applies(self) -> bool:
        """Return whether the next token is subject to the grammar, if there is one."""
        return not self._forced and self.splitter.state is not ReasoningState.OPEN

    def may_force(self, num_in_flight: int) -> bool:
        """Return whether the next token may be forced, which depends on the tokens in flight."""
        if self._forced:
            return True
        is_limited = self._budget is not None and self.splitter.state is not ReasoningState.ENDED
        return is_limited and self._used + num_in_flight >= (self._budget or 0)

    def take(self, token_id: int) -> bool:
        """Advance by one token, before its text is split. Return whether it belongs to the reasoning."""
        state = self.splitter.state
        if self._forced and self._forced[0] == token_id:
            self._forced.popleft()
            return True
        if state is ReasoningState.OPEN:
            self._used += 1
            return True
        if state is ReasoningState.POSSIBLE and self._has_grammar:
            if token_id == self._start_id:
                return True
            self.splitter.skip_reasoning()
        return False

    def count(self, is_reasoning: bool) -> int:
        """Return how many tokens are now known to be reasoning, after the last token's text was split."""
        self._force_end_if_due()
        self._uncounted += 1
        state = self.splitter.state
        if state is ReasoningState.POSSIBLE:
            return 0
        counted = self._uncounted if is_reasoning or state is ReasoningState.OPEN else 0
        self._uncounted = 0
        return counted

    def release_logprobs(self, logprobs: list[TokenLogprobs], *, is_last: bool = False) -> list[TokenLogprobs]:
        """Add logprobs. Return those of tokens that are known to be reasoning or answer, and at the end all."""
        self._logprobs += logprobs
        if self.splitter.state is ReasoningState.POSSIBLE and not is_last:
            return []
        released, self._logprobs = self._logprobs, []
        return released

    def mask(self, allowed: Masks | None) -> Masks | None:
        """Return the mask of the allowed next tokens.

        Args:
            allowed: the mask of the grammar, if it applies.
        """
        if self._forced:
            return self._bits([self._forced[0]])
        if not self._has_grammar or self.splitter.state is ReasoningState.ENDED:
            return allowed
        if self.splitter.state is ReasoningState.OPEN:
            return ~self._bits(self._eos)
        if allowed is not None and self._start_id is not None:
            allowed = allowed | self._bits([self._start_id])
        return allowed

    def _force_end_if_due(self) -> None:
        if self._budget is None or self._forced or self.splitter.state is not ReasoningState.OPEN:
            return
        if self._used >= self._budget:
            self._forced.extend(self._end_ids)

    def _bits(self, token_ids: Collection[int]) -> Masks:
        """Return a mask of these tokens, in the format of `fill_masks`."""
        mask = np.zeros(4 * -(-self._vocab_size // 32), dtype=np.uint8)
        for token_id in token_ids:
            mask[token_id >> 3] |= 1 << (token_id & 7)
        return mask
