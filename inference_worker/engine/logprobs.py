"""Log-probabilities of tokens, as the model gave them: before bias, penalties and temperature."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from inference_worker.engine.request import TokenLogprobs
from inference_worker.engine.scheduler import ScheduledSequence

# Logits worked on at once. On the CPU, float32 temporaries of this size stay in its caches, and come from the heap and
# not, page by page, from the system.
_CPU_ELEMENTS = 1 << 19
_GPU_ELEMENTS = 1 << 26
_HEAD_ELEMENTS = 1 << 22  # logits made at once on the CPU: many rows for each pass over the head's weights


def rows_at_once(logits: torch.Tensor) -> int:
    """Rows of `logits` [rows, vocab] to work on at once, so that memory is bounded."""
    return max(1, (_GPU_ELEMENTS if logits.is_cuda else _CPU_ELEMENTS) // logits.shape[-1])


def rank_tokens(logits: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """The log-probability and rank of each row's token, and the `counts[row]` likeliest beside it.

    Args:
        logits: [rows, vocab].
        tokens: int64 [rows].
    """
    step = rows_at_once(logits)
    found: list[TokenLogprobs] = []
    for at in range(0, len(counts), step):
        part = slice(at, at + step)
        found += _rank(logits[part].float().log_softmax(-1), tokens[part], counts[part])
    return found


def prompt_logprobs(
    scheduled: Sequence[ScheduledSequence],
    hidden: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> dict[int, list[TokenLogprobs]]:
    """By place in the batch, of those that asked: the prompt tokens that follow those computed now.

    The first of `n` answers brings them. A prompt computed again after a preemption, with its answer begun, has brought
    them already.

    Args:
        hidden: states of all tokens of the batch, [num_tokens, hidden].
        logits_of: makes logits [rows, vocab] of hidden states [rows, hidden].
    """
    found: dict[int, list[TokenLogprobs]] = {}
    offset = 0
    for place, s in enumerate(scheduled):
        count = s.seq.params.prompt_logprobs
        targets = s.seq.tokens[s.start + 1 : min(s.start + 1 + s.num_new_tokens, s.seq.num_prompt_tokens)]
        if count is not None and targets and s.seq.index == 0 and not s.seq.num_output_tokens:
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
) -> list[TokenLogprobs]:
    step = max(1, (_GPU_ELEMENTS if hidden.is_cuda else _HEAD_ELEMENTS) // vocab_size)
    tokens = torch.tensor(targets, device=hidden.device)
    found: list[TokenLogprobs] = []
    for at in range(0, len(targets), step):
        logits = logits_of(hidden[at : at + step])
        found += rank_tokens(logits, tokens[at : at + step], [count] * len(logits))
    return found


def _rank(scores: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    chosen = scores.gather(-1, tokens[:, None])
    ranks = (scores > chosen).sum(-1, dtype=torch.int32).tolist()
    best = scores.topk(min(max(counts), scores.shape[-1]), dim=-1)
    rows = zip(
        tokens.tolist(), chosen[:, 0].tolist(), ranks, best.indices.tolist(), best.values.tolist(), counts, strict=True
    )
    return [
        TokenLogprobs(token, logprob, rank + 1, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, logprob, rank, ids, values, count in rows
    ]
