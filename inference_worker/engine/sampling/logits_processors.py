"""Changes of a request's logits before sampling: logit_bias, min_tokens and grammar masks.

Only the affected logits are read and written, with one index over the whole batch. A request affects at most thousands
of a vocabulary's hundred thousand logits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from inference_worker.contract.request import SamplingParams
from inference_worker.engine.structured_output.grammars import Masks
from inference_worker.engine.tensors import upload, upload_all

# Less likely than all tokens except those that a grammar excludes: if nothing else is left, the output continues.
_FORBIDDEN = -1e30

Edited = tuple[int, "LogitsProcessors", int]  # row, its changes, position of the next token


def edits_logits(params: SamplingParams) -> bool:
    """Return whether `params` change any logits, apart from penalties."""
    return bool(params.logit_bias) or params.min_tokens > 0


class LogitsProcessors:
    """The bias and the minimum length of one request."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int, eos_token_ids: Collection[int]) -> None:
        self._min_tokens = params.min_tokens
        self.num_biased = len(params.logit_bias)
        # They do not change, so they are copied to the device once.
        self._bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([value for _, value in params.logit_bias], dtype=torch.float32)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._num_prompt_tokens = num_prompt_tokens

    def forbidden(self, position: int) -> npt.NDArray[np.int64]:
        """Return the ids that must not be chosen at `position`."""
        early = position - self._num_prompt_tokens < self._min_tokens
        return self._ends if early else self._ends[:0]

    def bias(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids with a bias, and the numbers to add to their logits."""
        if self._bias.device != device:
            self._bias_ids, self._bias = upload_all([self._bias_ids.numpy(), self._bias.numpy()], device)
        return self._bias_ids, self._bias


def apply_edits(scores: torch.Tensor, edited: Sequence[Edited]) -> None:
    """Change `scores`, float32 [rows, vocab] and contiguous, in place."""
    flat, vocab = scores.view(-1), scores.shape[-1]
    biased = [(row, edits) for row, edits, _ in edited if edits.num_biased]
    if biased:
        lengths = np.array([edits.num_biased for _, edits in biased])
        rows = np.array([row for row, _ in biased])
        repeats, starts = upload_all([lengths, rows * vocab], flat.device)
        parts = [edits.bias(flat.device) for _, edits in biased]
        tokens, values = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        offsets = torch.repeat_interleave(starts, repeats, output_size=int(lengths.sum()))
        flat.index_add_(0, offsets.add_(tokens), values)
    excluded = [ids + row * vocab for row, edits, position in edited if len(ids := edits.forbidden(position))]
    if excluded:
        flat.index_fill_(0, upload(np.concatenate(excluded), flat.device), _FORBIDDEN)


def apply_masks(scores: torch.Tensor, rows: Sequence[int], masks: Masks) -> None:
    """Exclude the tokens that the masks do not allow from these rows of `scores`, float32 [rows, vocab], in place."""
    width = scores.shape[-1]
    bits, index = upload_all([masks.reshape(-1), np.array(rows)], scores.device)
    added = _by_byte(scores.device).index_select(0, bits.to(torch.int32)).view(len(rows), -1)
    scores.index_add_(0, index, added[:, :width])


@cache
def _by_byte(device: torch.device) -> torch.Tensor:
    """Return the numbers that each value of a mask byte adds to eight logits: float32 [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.where(torch.from_numpy(bits).bool(), 0.0, float("-inf")).to(device)
