"""Feed-forward blocks: gated, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from inference_worker.checkpoints.model_config import ModelConfig, MoeConfig
from inference_worker.engine.architectures.layers import Layers, Linear
from inference_worker.engine.loading.loader import Weights
from inference_worker.engine.quantization.linear_weights import take_linear
from inference_worker.engine.quantization.weights import Weight, concatenate


class FeedForward(Protocol):
    """A feed-forward block."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, [num_tokens, hidden]."""

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the block's output plus `other`."""


class GatedFeedForward:
    """down(activation(gate(x)) · up(x)). `gated` computes the input of `down`."""

    def __init__(self, gated: Callable[[torch.Tensor], torch.Tensor], down: Linear) -> None:
        self.gated, self.down = gated, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gated(x))

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.down.add(self.gated(x), other)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A block for every token, whose output is weighted by a sigmoid."""

    block: GatedFeedForward
    gate: Linear
    sigmoid: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * self.sigmoid(self.gate(x))


class MixtureOfExperts:
    """Experts of which a router chooses some for each token. Their outputs are weighted and added."""

    def __init__(
        self,
        config: MoeConfig,
        router: Linear,
        experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        softmax: Callable[[torch.Tensor], torch.Tensor],
        shared: SharedExpert | None = None,
    ) -> None:
        self._config, self._router, self._experts = config, router, experts
        self._softmax, self._shared = softmax, shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        per_token = self._config.experts_per_token
        weights, chosen = torch.topk(self._softmax(self._router(x)), per_token, dim=-1)
        if self._config.normalize:
            total = weights[:, :1].clone()
            for rank in range(1, per_token):  # a fixed order of additions
                total += weights[:, rank : rank + 1]
            weights /= total
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # the rows of each expert become consecutive
        # bincount would wait for the device.
        counts = flat.new_zeros(self._config.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        by_expert = self._experts(x.index_select(0, order // per_token), counts)
        outputs = torch.empty_like(by_expert).index_copy_(0, order, by_expert)
        outputs = outputs.view(len(x), per_token, -1).mul_(weights.to(x.dtype)[:, :, None])
        result = self._shared(x) if self._shared else outputs[:, 0].clone()
        for rank in range(0 if self._shared else 1, per_token):
            result += outputs[:, rank]
        return result

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x) + other


class SeparateExperts:
    """Experts that are called one after another, each with its rows. For the CPU and the batch-invariant mode."""

    def __init__(self, blocks: Sequence[GatedFeedForward]) -> None:
        self._blocks = blocks

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = torch.split(rows, counts.tolist())
        return torch.cat([block(part) for block, part in zip(self._blocks, parts, strict=True) if len(part)])


class GroupedExperts:
    """Experts in one grouped matrix product. It does not wait for the device.

    Args:
        gate_up: [num_experts, hidden, 2 × width].
        down: [num_experts, width, hidden].
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, gate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._gate_up, self._down, self._gate = gate_up, down, gate

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        inner = self._gate(functional.grouped_mm(rows, self._gate_up, offs=ends))
        return functional.grouped_mm(inner, self._down, offs=ends)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a family's expert weights in a layer. `{}` is the expert's index."""

    router: str
    gate: str
    up: str
    down: str
    shared: str = ""  # prefix of a shared expert
    shared_gate: str = ""


def load_gated(
    weights: Weights,
    layers: Layers,
    config: ModelConfig,
    names: Sequence[str],
    inner: int,
    *,
    bias: bool = False,
    factors: torch.Tensor | None = None,
    inner_factors: torch.Tensor | None = None,
) -> GatedFeedForward:
    """Return the block of the weights `names`: gate, up and down, or the fused gate and up, and down.

    Args:
        factors: of the inputs of gate and up, as in `take_linear`.
        inner_factors: of the inputs of down. The outputs of up are divided by them.
    """
    hidden, fused = config.hidden_size, len(names) == 2
    *inputs, down = names
    outs = [2 * inner] if fused else [inner, inner]
    divisors = None if inner_factors is None else torch.cat((torch.ones_like(inner_factors), inner_factors))
    gate_up = take_together(weights, inputs, outs, hidden, bias=bias, factors=factors, divisors=divisors)
    return GatedFeedForward(
        layers.gated_linear(*gate_up, config.activation),
        layers.linear(*take_together(weights, [down], [hidden], inner, bias=bias, factors=inner_factors)),
    )


def take_together(
    weights: Weights,
    names: Sequence[str],
    outs: Sequence[int],
    inputs: int,
    *,
    bias: bool,
    factors: torch.Tensor | None = None,
    divisors: torch.Tensor | None = None,
) -> tuple[Weight, torch.Tensor | None]:
    """Return the weights `names`, which have the same inputs and `outs` outputs, as one; and their biases.

    Args:
        factors: of the inputs, as in `take_linear`.
        divisors: of all outputs together, as in `take_linear`. The biases are divided, too.
    """
    shapes = [(out, inputs) for out in outs]
    of_parts = [None] * len(names) if divisors is None else torch.split(divisors, list(outs))
    parts = [
        take_linear(weights, name, shape, factors, part)
        for name, shape, part in zip(names, shapes, of_parts, strict=True)
    ]
    weight = concatenate(parts)
    if not bias:
        return weight, None
    biases = [weights.take(f"{name}.bias", (out,)) for name, out in zip(names, outs, strict=True)]
    together = torch.cat(biases)
    return weight, together if divisors is None else together / divisors.to(together)


def load_experts(
    weights: Weights, layers: Layers, config: ModelConfig, moe: MoeConfig, prefix: str, names: ExpertNames
) -> MixtureOfExperts:
    """Return the experts of one layer, in the implementation for the device."""
    inner, hidden = moe.intermediate_size, config.hidden_size
    router = weights.take(f"{prefix}.{names.router}.weight", (moe.num_experts, hidden))
    by_expert = [
        [f"{prefix}.{name.format(expert)}" for name in (names.gate, names.up, names.down)]
        for expert in range(moe.num_experts)
    ]
    experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    if router.is_cuda and router.dtype == torch.bfloat16 and not layers.is_invariant:
        gate_up, down = [], []
        for gate_name, up_name, down_name in by_expert:
            parts = [weights.take(f"{name}.weight", (inner, hidden)) for name in (gate_name, up_name)]
            gate_up.append(torch.cat(parts).T)
            down.append(weights.take(f"{down_name}.weight", (hidden, inner)).T)
        experts = GroupedExperts(torch.stack(gate_up), torch.stack(down), layers.gate(config.activation))
    else:
        experts = SeparateExperts([load_gated(weights, layers, config, part, inner) for part in by_expert])
    shared = None
    if moe.shared_size:
        block = [f"{prefix}.{names.shared}.{part}_proj" for part in ("gate", "up", "down")]
        gate = layers.linear(weights.take(f"{prefix}.{names.shared_gate}.weight", (1, hidden)))
        shared = SharedExpert(load_gated(weights, layers, config, block, moe.shared_size), gate, layers.sigmoid)
    return MixtureOfExperts(moe, layers.linear(router), experts, layers.softmax, shared)
