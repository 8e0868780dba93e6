"""Drafts of the tokens that a grammar forces. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence as Items

from inference_worker.engine.sequences.sequence import Sequence
from inference_worker.engine.speculation.drafter import MAX_EVIDENCE, DraftToken

MAX_FORCED_TOKENS = 64  # appended without a forward pass after a sampled token


class ForcedTokens:
    """A drafter of tokens at positions where the sequence's grammar allows one token only."""

    name = "forced"

    def propose(self, seq: Sequence, drafts: Items[int], limit: int) -> list[DraftToken]:
        if seq.active_grammar is None:
            return []
        found = seq.active_grammar.forced_tokens(drafts)[:limit]
        return [DraftToken(token_id, self.name, MAX_EVIDENCE) for token_id in found]


def take_forced_tokens(seq: Sequence) -> list[int]:
    """Return the tokens that must follow, for a sequence whose tokens need no log-probabilities.

    The sampler would choose exactly these tokens, because all others are masked. So no forward pass is necessary.
    """
    if seq.active_grammar is None or seq.params.logprobs is not None:
        return []
    return seq.active_grammar.forced_tokens()[:MAX_FORCED_TOKENS]
