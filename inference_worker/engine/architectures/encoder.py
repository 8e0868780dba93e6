"""The interface of encoders, and the packing of their inputs. Encoders need one pass and no cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch.nn import functional

from kernels.native.library import Library
from kernels.native.operators import SelfAttention

PADDING = 1 / 8  # maximum share of padding in a group's rows; only attention sees padding
LOCAL_QUERIES = 256  # queries for which windowed attention is computed together


class Encoder(Protocol):
    """A model that computes the hidden states of whole inputs."""

    def forward(self, token_ids: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Return hidden states [tokens, hidden] for the token ids [tokens] of the packed inputs."""

    def score(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return a cross-encoder's scores [inputs, 1], before the activation, for pooled states [inputs, hidden]."""


class Packing:
    """The places of a batch's inputs among its tokens, which are concatenated without padding.

    Attention is computed for groups of inputs of similar length. `lengths` must not increase. Then a group is a slice
    of the tokens, and a group of equal lengths needs neither gathering nor a mask.

    Args:
        second_starts: the position of the second text in each input that is a pair of texts. None: no input is a pair.
        kernels: the C kernels, which attend in bfloat16 if they support the size of the heads.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        second_starts: Sequence[int] | None = None,
        kernels: Library | None = None,
    ) -> None:
        counts = torch.tensor(lengths, device=device)
        self.lengths = counts
        self.ends = counts.cumsum(0)
        self.starts = self.ends - counts
        self.inputs = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts)  # input of each token
        self.positions = torch.arange(int(sum(lengths)), device=device) - self.starts.index_select(0, self.inputs)
        self.is_second: torch.Tensor | None = None  # whether each token is part of the second text
        if second_starts is not None:
            starts = torch.tensor(second_starts, device=device).index_select(0, self.inputs)
            self.is_second = self.positions >= starts
        self._native = None if kernels is None else SelfAttention(kernels, lengths)

    @cached_property
    def _groups(self) -> list[_Group]:
        groups, lengths = list[_Group](), self.lengths.tolist()
        first = token = 0
        for last in range(1, len(lengths) + 1):
            if last == len(lengths) or lengths[last] < lengths[first] * (1 - PADDING):
                members = lengths[first:last]
                groups.append(_Group(token, members, self.lengths.device))
                token += sum(members)
                first = last
        return groups

    def _native_for(self, query: torch.Tensor) -> SelfAttention | None:
        """Return the attention on the C kernels, or None if they do not support the query."""
        is_supported = query.dtype == torch.bfloat16 and SelfAttention.supports(query.shape[-1])
        return self._native if is_supported else None

    def attend(self, qkv: torch.Tensor, window: int = 0) -> torch.Tensor:
        """Return the attention [tokens, heads × head_dim] within each input, for qkv [tokens, 3, heads, head_dim].

        A token attends to the tokens up to `window` places before and after it; 0: to all tokens of its input.
        """
        query, key, value = qkv.unbind(1)
        if native := self._native_for(query):
            limit = window or None
            return native.attend(query, key, value, query.shape[-1] ** -0.5, limit, limit)
        return torch.cat([group.attend(qkv, window) for group in self._groups])

    def attend_causally(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """Return the attention [tokens, heads × head_dim] of each token to itself and to earlier tokens of its input.

        Args:
            query: [tokens, heads, head_dim].
            key, value: [tokens, kv_heads, head_dim].
            window: a token attends to itself and the `window` − 1 tokens before; 0: to all tokens before.
        """
        if native := self._native_for(query):
            return native.attend(query, key, value, scale, window - 1 if window else None, 0)
        return torch.cat([group.attend_causally(query, key, value, scale, window) for group in self._groups])


class _Group:
    """Inputs of similar length: the batch's tokens from `start` to `end`."""

    def __init__(self, start: int, lengths: Sequence[int], device: torch.device) -> None:
        self.start, self.end = start, start + sum(lengths)
        self.count, self.longest = len(lengths), lengths[0]
        self.mask: torch.Tensor | None = None  # [inputs, 1, 1, longest]: places that contain tokens; None: all
        if lengths[-1] < lengths[0]:
            is_token = torch.arange(self.longest, device=device) < torch.tensor(lengths, device=device)[:, None]
            self.mask = is_token[:, None, None, :]
            self.places = is_token.flatten().nonzero().squeeze(1)  # places of the tokens

    def attend(self, qkv: torch.Tensor, window: int) -> torch.Tensor:
        """Return the attention [tokens, heads × head_dim] over the group's rows."""
        q, k, v = self._pad(qkv).permute(2, 0, 3, 1, 4)
        if 0 < window < self.longest - 1:
            return self._tokens(_attend_locally(q, k, v, window, window, self.mask))
        return self._tokens(functional.scaled_dot_product_attention(q, k, v, self.mask))

    def attend_causally(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """Return the causal attention [tokens, heads × head_dim]. Padding follows the tokens, so it needs no mask."""
        q, k, v = (self._pad(each).transpose(1, 2) for each in (query, key, value))
        if 0 < window < self.longest:
            return self._tokens(_attend_locally(q, k, v, window - 1, 0, None, scale))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return self._tokens(mixed)

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        """Return the group's rows of x [tokens, …] as [inputs, longest, …]."""
        rows = x[self.start : self.end]
        if self.mask is not None:
            rows = rows.new_zeros(self.count * self.longest, *rows.shape[1:]).index_copy_(0, self.places, rows)
        return rows.view(self.count, self.longest, *rows.shape[1:])

    def _tokens(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return the tokens' rows of the attention [inputs, heads, longest, head_dim]."""
        mixed = mixed.transpose(1, 2).reshape(self.count * self.longest, -1)
        return mixed if self.mask is None else mixed.index_select(0, self.places)


def _attend_locally(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    before: int,
    after: int,
    mask: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention to the tokens up to `before` places before and `after` places after each token.

    A part of the queries sees only the keys that its windows reach. Rows of padding without any key in their window
    are NaN. They are not used.
    """
    length, parts = q.shape[2], []
    places = torch.arange(length, device=q.device)
    for start in range(0, length, LOCAL_QUERIES):
        end = min(start + LOCAL_QUERIES, length)
        first, last = max(0, start - before), min(length, end + after)
        distances = places[first:last] - places[start:end, None]
        allowed = (distances >= -before) & (distances <= after)
        if mask is not None:
            allowed = allowed & mask[..., first:last]
        queries, keys, values = q[:, :, start:end], k[:, :, first:last], v[:, :, first:last]
        mixed = functional.scaled_dot_product_attention(queries, keys, values, allowed, scale=scale, enable_gqa=True)
        parts.append(mixed)
    return torch.cat(parts, dim=2)
