"""The decoder that all families share. A family is a subclass that sets its differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal

import torch

from inference_worker.checkpoints.model_config import ModelConfig
from inference_worker.engine.architectures.feed_forward import (
    ExpertNames,
    FeedForward,
    GatedFeedForward,
    load_experts,
    load_gated,
    take_together,
)
from inference_worker.engine.architectures.layers import Layers, Linear, RMSNorm
from inference_worker.engine.architectures.rope import NativeRotation, NoRotation, Rope, Rotation
from inference_worker.engine.architectures.smoothing import LayerFactors, Smoothing
from inference_worker.engine.attention.base import AttentionBackend, AttentionSpec, StepMetadata
from inference_worker.engine.loading.loader import Weights
from inference_worker.engine.quantization.linear_weights import LinearWeights
from inference_worker.engine.quantization.weights import select_outputs
from kernels.native.library import Library
from kernels.native.operators import LayerOperator, LayerStack


@dataclass(frozen=True, slots=True)
class NormNames:
    """The names of a layer's norms: before and after attention and feed-forward. An empty name is no norm."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


SANDWICH = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


class Decoder:
    """A decoder. Sizes, windows and multipliers come from the configuration, the rest from the family's class."""

    norms: ClassVar[NormNames] = NormNames()
    norm_offset: ClassVar[float] = 0.0
    # Normalization of queries and keys: of each head, or of all heads of a token together.
    qk_norm: ClassVar[Literal["", "head", "token"]] = ""
    qkv_names: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    mlp_names: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj", "down_proj")
    experts: ClassVar[ExpertNames | None] = None
    prefixes: ClassVar[tuple[str, ...]] = ("model",)  # beginnings of the weights' names; the first that exists
    scales_embedding: ClassVar[bool] = False  # by the square root of the hidden size
    rotates_neighbors: ClassVar[bool] = False  # the rotary embedding pairs dimensions 0 and 1, 2 and 3, and so on

    def __init__(self, config: ModelConfig, weights: Weights, layers: Layers) -> None:
        prefix = next((p for p in self.prefixes if weights.has(f"{p}.embed_tokens.weight")), self.prefixes[0])
        shape = (config.vocab_size, config.hidden_size)
        name = f"{prefix}.embed_tokens.weight"
        # PyTorch takes it converted to the dtype. The C kernels convert it themselves, in parts.
        take = weights.take if layers.kernels is None else weights.take_unconverted
        embedding = take(name, shape)
        is_mapped = weights.is_mapped(name, embedding)
        self.dtype = dtype = embedding.dtype if layers.kernels is None else torch.bfloat16
        device = embedding.device
        # Of the hidden states between blocks. Their rounding to 16 bits would be most of the model's error. On the CPU
        # they take little time and memory beside the weights.
        self._hidden_dtype = torch.float32 if device.type == "cpu" else dtype
        scale = config.hidden_size**0.5 if self.scales_embedding else config.embedding_multiplier
        self._multiplier = torch.tensor(scale).to(dtype).item()
        ropes = [layers.rope(config.rope, config, dtype, device)]
        if config.local_rope not in (None, config.rope):
            ropes.append(layers.rope(config.local_rope or config.rope, config, dtype, device))
        self._ropes: list[Rope] = ropes
        windows = config.windows or (0,) * config.num_layers
        scale = config.attention_scale or config.head_dim**-0.5
        self.attention_specs = [AttentionSpec(scale, window, config.attention_soft_cap) for window in windows]
        unrotated = config.unrotated or (False,) * config.num_layers
        self._layer_ropes = [
            len(ropes) if plain else len(ropes) - 1 if window else 0
            for window, plain in zip(windows, unrotated, strict=True)
        ]
        smooth = self._start_smoothing(config, weights, embedding, layers.kernels)
        self._layers: list[DecoderLayer] = []
        for index in range(config.num_layers):
            name = f"{prefix}.layers.{index}"
            factors = smooth(name, index) if smooth is not None else LayerFactors()
            self._layers.append(DecoderLayer(self, config, weights, layers, name, index, factors))
        operators = [
            None if rope == len(ropes) else layer.fuse(layers)
            for layer, rope in zip(self._layers, self._layer_ropes, strict=True)
        ]
        # The runs of consecutive layers: those that the C kernels compute in one call, and the others.
        self._runs: list[tuple[LayerStack | None, slice]] = []
        for _, run in groupby(range(len(operators)), lambda index: operators[index] is None):
            indexes = list(run)
            fused = [operator for index in indexes if (operator := operators[index]) is not None]
            stack = LayerStack(fused, indexes[0]) if fused else None
            self._runs.append((stack, slice(indexes[0], indexes[-1] + 1)))
        norm = weights.take(f"{prefix}.norm.weight", (config.hidden_size,))
        self._norm = layers.norm(norm, config.rms_norm_eps, self.norm_offset)
        is_tied = config.tie_word_embeddings
        head = embedding if is_tied else take(_HEAD, shape)
        self._head = layers.head(head, rescores=isinstance(weights, LinearWeights) and weights.is_int8)
        self._embed = layers.embedding(embedding, self._head if is_tied else None, is_mapped=is_mapped)
        self._logit_divisor, self._logit_soft_cap = config.logit_divisor, config.logit_soft_cap
        self._limit_softly = layers.limit_softly

    def _start_smoothing(
        self,
        config: ModelConfig,
        weights: Weights,
        embedding: torch.Tensor,
        kernels: Library | None,
    ) -> Callable[[str, int], LayerFactors] | None:
        """Return the function that measures the factors of the layer of a name and index, or None if none has factors.

        It is called for each layer in order.
        """
        if not isinstance(weights, LinearWeights) or not weights.is_int8:
            return None
        smoothing = Smoothing(
            config,
            self.attention_specs,
            self.dtype,
            lambda ids: self._scale(embedding[ids.to(embedding.device)].to(self.dtype)),
        )
        plain = Layers(kernels=kernels)
        rotations: list[Rotation] = [
            plain.rope(rope, config, self.dtype, embedding.device).at(smoothing.positions)
            for rope in dict.fromkeys((config.rope, config.local_rope or config.rope))
        ]
        rotations.append(NoRotation())

        def measure(name: str, index: int) -> LayerFactors:
            with weights.disable_quantization():
                own = Layers(kernels=None if kernels is None else kernels.with_own_memory())
                layer = DecoderLayer(self, config, weights, own, name, index)
            return smoothing.measure(layer, rotations[self._layer_ropes[index]])

        return measure

    def forward(self, token_ids: torch.Tensor, attention: AttentionBackend, metadata: StepMetadata) -> torch.Tensor:
        hidden = self._scale(self._embed(token_ids))
        rotations: list[Rotation] = [rope.at(metadata.positions) for rope in self._ropes]
        rotations.append(NoRotation())
        native = attention.native(metadata)
        for stack, span in self._runs:
            of_layers = [rotations[rope] for rope in self._layer_ropes[span]]
            steps = [rotation.step for rotation in of_layers if isinstance(rotation, NativeRotation)]
            if stack is not None and native is not None and len(steps) == len(of_layers):
                hidden = stack(hidden, steps, native)
                continue
            for layer, rotation in zip(self._layers[span], of_layers, strict=True):
                hidden = layer.forward(hidden, rotation, attention, metadata)
        return hidden

    def _scale(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of embeddings."""
        hidden = embedded.to(self._hidden_dtype)
        return hidden if self._multiplier == 1 else hidden * self._multiplier

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden)

    def remove_head(self) -> None:
        del self._head

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._head(self.normalize(hidden))
        if self._logit_divisor != 1:
            logits = logits / self._logit_divisor
        return self._limit_softly(logits, self._logit_soft_cap) if self._logit_soft_cap else logits


_HEAD = "lm_head.weight"


class DecoderLayer:
    """Attention and a feed-forward block, each with normalization and a residual addition."""

    def __init__(
        self,
        family: Decoder,
        config: ModelConfig,
        weights: Weights,
        layers: Layers,
        prefix: str,
        index: int,
        factors: LayerFactors = LayerFactors(),  # noqa: B008  (immutable)
    ) -> None:
        self._index, self._dtype = index, family.dtype
        self._head_dim = config.head_dim
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._multiplier = config.residual_multiplier

        def norm(name: str, divisors: torch.Tensor | None = None) -> RMSNorm | None:
            if not name:
                return None
            weight = weights.take(f"{prefix}.{name}.weight", (config.hidden_size,))
            loaded = layers.norm(weight, config.rms_norm_eps, family.norm_offset)
            if divisors is not None:
                loaded.divide(divisors)
            return loaded

        names = family.norms
        self.before_attention = norm(names.before_attention, factors.attention)
        self._after_attention = norm(names.after_attention)
        self.before_mlp, self._after_mlp = norm(names.before_mlp, factors.mlp), norm(names.after_mlp)
        widths = [heads * config.head_dim for heads in self._heads]
        qkv, bias = [f"{prefix}.self_attn.{name}" for name in family.qkv_names], config.attention_bias
        outs = widths if len(qkv) == 3 else [sum(widths)]
        hidden, out = config.hidden_size, [f"{prefix}.self_attn.o_proj"]
        qkv_weight, qkv_bias = take_together(
            weights, qkv, outs, hidden, bias=bias or config.qkv_bias, factors=factors.attention
        )
        if family.rotates_neighbors:
            rows = self._rows_by_halves(config.rope.rotary_dim or config.head_dim)
            qkv_weight = select_outputs(qkv_weight, rows)
            qkv_bias = None if qkv_bias is None else qkv_bias[rows.to(qkv_bias.device)]
        self._qkv = layers.linear(qkv_weight, qkv_bias)
        self._out = layers.linear(*take_together(weights, out, [hidden], widths[0], bias=bias))
        self._qk_norms: list[RMSNorm] = []
        if family.qk_norm:
            sizes = widths[:2] if family.qk_norm == "token" else [config.head_dim] * 2
            for name, size in zip(("q_norm", "k_norm"), sizes, strict=True):
                weight = weights.take(f"{prefix}.self_attn.{name}.weight", (size,))
                self._qk_norms.append(layers.norm(weight, config.rms_norm_eps, family.norm_offset))
        self.mlp = _load_mlp(family, config, weights, layers, prefix, index, factors)

    def _rows_by_halves(self, rotary: int) -> torch.Tensor:
        """Return the order of the rows of queries, keys and values in which rotation pairs halves, not neighbors.

        Scores do not depend on the order of a head's dimensions, if it is that of both queries and keys.
        """
        dimensions = torch.arange(self._head_dim)
        swapped = torch.cat((dimensions[:rotary:2], dimensions[1:rotary:2], dimensions[rotary:]))
        orders = torch.stack([swapped] * sum(self._heads[:2]) + [dimensions] * self._heads[2])
        return (orders + self._head_dim * torch.arange(len(orders))[:, None]).flatten()

    def forward(
        self, hidden: torch.Tensor, rotation: Rotation, attention: AttentionBackend, metadata: StepMetadata
    ) -> torch.Tensor:
        x = self._prepare(hidden, self.before_attention)
        qkv = self._qkv(x).view(len(x), -1, self._head_dim)
        if self._qk_norms:
            qkv = self._normalize(qkv)
        query, key, value = torch.split(rotation.apply(qkv), self._heads, dim=1)
        attended = attention.attend(self._index, query, key, value, metadata)
        hidden = self._add(self._out, attended, self._after_attention, hidden)
        return self._add(self.mlp, self._prepare(hidden, self.before_mlp), self._after_mlp, hidden)

    def fuse(self, layers: Layers) -> LayerOperator | None:
        """Return the whole layer as an operator of the C kernels, or None if the layer has other parts."""
        if self._multiplier != 1 or not isinstance(self.mlp, GatedFeedForward):
            return None
        norms = (self.before_attention, self._after_attention, self.before_mlp, self._after_mlp)
        products = (self._qkv, self._out, self.mlp.gated, self.mlp.down)
        return layers.fuse((*norms, *(self._qk_norms or (None, None))), products)

    def _prepare(self, hidden: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        """Return the input of a block, in the dtype."""
        return (norm(hidden) if norm else hidden).to(self._dtype)

    def _add(
        self, block: Linear | FeedForward, x: torch.Tensor, norm: RMSNorm | None, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Return the residual addition of the block's output."""
        if norm is None and self._multiplier == 1:
            return block.add(x, hidden)
        output = block(x)
        if norm and self._multiplier == 1:
            return norm.add(output, hidden)
        return (norm(output) if norm else output).to(hidden.dtype) * self._multiplier + hidden

    def _normalize(self, qkv: torch.Tensor) -> torch.Tensor:
        parts = list(torch.split(qkv, self._heads, dim=1))
        for index, norm in enumerate(self._qk_norms):
            rows = parts[index].reshape(-1, norm.weight.shape[0])
            parts[index] = norm(rows).view(parts[index].shape)
        return torch.cat(parts, dim=1)


def _load_mlp(
    family: Decoder,
    config: ModelConfig,
    weights: Weights,
    layers: Layers,
    prefix: str,
    index: int,
    factors: LayerFactors,
) -> FeedForward:
    moe = config.moe
    if moe is not None and family.experts is not None and moe.sparse_layers[index]:
        return load_experts(weights, layers, config, moe, prefix, family.experts)
    names = [f"{prefix}.mlp.{name}" for name in family.mlp_names]
    return load_gated(
        weights, layers, config, names, config.intermediate_size, bias=config.mlp_bias, factors=factors.mlp,
        inner_factors=factors.inner,
    )  # fmt: skip
