"""Log-probabilities of tokens from the model's logits: before bias, penalties and temperature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from inference_worker.contract.request import TokenLogprobs
from inference_worker.engine.sequences.step import ScheduledSequence
from inference_worker.engine.tensors import download, rows_per_call, upload

_HEAD_FACTOR = 8  # logits are computed for more rows per call than are ranked: each call reads the matrix


@dataclass(frozen=True, slots=True)
class RankedTokens:
    """Log-probabilities of tokens, by row."""

    tokens: torch.Tensor  # int64 [rows]
    logprobs: torch.Tensor  # float32 [rows]
    ranks: torch.Tensor  # int32 [rows]; 0 is the most likely token
    top_tokens: torch.Tensor  # int64 [rows, most], most likely first
    top_logprobs: torch.Tensor  # float32 [rows, most]
    counts: Sequence[int]  # requested number of top tokens, by row

    @classmethod
    def cat(cls, parts: Sequence[RankedTokens]) -> RankedTokens:
        """Return the rows of all parts, which must have the same `most`."""
        return cls(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.logprobs for part in parts]),
            torch.cat([part.ranks for part in parts]),
            torch.cat([part.top_tokens for part in parts]),
            torch.cat([part.top_logprobs for part in parts]),
            [count for part in parts for count in part.counts],
        )

    def download(self) -> RankedTokens:
        """Start the copies to host memory. They can be read after a later `mark` was waited for."""
        return RankedTokens(
            download(self.tokens),
            download(self.logprobs),
            download(self.ranks),
            download(self.top_tokens),
            download(self.top_logprobs),
            self.counts,
        )

    def read(self) -> list[TokenLogprobs]:
        """Return the log-probabilities of each row. On a device, this waits."""
        columns = (self.tokens, self.logprobs, self.ranks, self.top_tokens, self.top_logprobs)
        rows = zip(*(column.tolist() for column in columns), self.counts, strict=True)
        return [
            TokenLogprobs(token, logprob, rank + 1, tuple(zip(ids[:count], values[:count], strict=True)))
            for token, logprob, rank, ids, values, count in rows
        ]


def rank_tokens(logits: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int]) -> RankedTokens:
    """Return the log-probability and the rank of each row's token, and the row's `counts[row]` most likely tokens.

    Args:
        logits: [rows, vocab].
        tokens: int64 [rows].
    """
    vocab = logits.shape[-1]
    step, most = rows_per_call(vocab, logits.device), min(max(counts), vocab)
    parts = []
    for at in range(0, len(counts), step):
        scores = logits[at : at + step].float().log_softmax(-1)
        part = tokens[at : at + step]
        chosen = scores.gather(-1, part[:, None])
        # Sums of ones and zeros in float32 are exact, and many times as fast as sums of booleans.
        ranks = torch.gt(scores, chosen, out=torch.empty_like(scores)).sum(-1).to(torch.int32)
        top = scores.topk(most, dim=-1)
        parts.append(RankedTokens(part, chosen[:, 0], ranks, top.indices, top.values, counts[at : at + step]))
    return parts[0] if len(parts) == 1 else RankedTokens.cat(parts)


def prompt_logprobs(
    scheduled: Sequence[ScheduledSequence],
    hidden: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> dict[int, RankedTokens]:
    """Return the log-probabilities of the prompt tokens after the computed ones, by index in the batch, if requested.

    Only the first of `n` sequences returns them. A prompt that is computed again after a preemption has returned them
    before.

    Args:
        hidden: states of all tokens of the batch, [num_tokens, hidden].
        logits_of: returns logits [rows, vocab] for hidden states [rows, hidden].
    """
    found: dict[int, RankedTokens] = {}
    offset = 0
    for place, s in enumerate(scheduled):
        count = s.seq.params.prompt_logprobs
        if count is not None and s.seq.index == 0 and not s.seq.num_output_tokens:
            targets = s.seq.tokens[s.start + 1 : s.start + 1 + s.num_new_tokens]
            if targets:
                rows = hidden[offset : offset + len(targets)]
                found[place] = _rank_prompt(rows, targets, count, logits_of, vocab_size)
        offset += s.num_new_tokens
    return found


def _rank_prompt(
    hidden: torch.Tensor,
    targets: Sequence[int],
    count: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> RankedTokens:
    step = rows_per_call(vocab_size, hidden.device, factor=_HEAD_FACTOR)
    tokens = upload(targets, hidden.device)
    parts = []
    for at in range(0, len(targets), step):
        part = tokens[at : at + step]
        parts.append(rank_tokens(logits_of(hidden[at : at + step]), part, [count] * len(part)))
    return RankedTokens.cat(parts)
