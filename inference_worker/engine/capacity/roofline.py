"""The minimum costs of a step on the device: floating-point operations and bytes. Does not import torch.

The costs are those of the model's mathematics: matrix products with the weights (2 operations per parameter and token),
attention of each token to its context, weights read once per step, keys and values read once per sequence and written
once per token. Activations and additional work of a backend are not counted, so shares of the peak measure useful work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from inference_worker.checkpoints.model_config import ModelConfig


class BatchShape(NamedTuple):
    """The counts of a step's batch. Entries that compute one token and its drafts are decodes, the others prefill."""

    decodes: int  # tokens
    prefill_tokens: int
    decode_pairs: int  # pairs of a decode's token and a token it attends to, including itself
    prefill_pairs: int
    kv_tokens: int  # sum of all sequences' lengths, including new tokens
    samples: int  # sampled tokens and drafts; only they need logits


class StepCost(NamedTuple):
    """The operations and bytes of a step."""

    prefill_flops: int
    decode_flops: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class Peaks:
    """The measured peak rates of a device: operations and bytes (read or written) per second."""

    flops: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """The costs of a model on a device.

    `peaks` is None if the device was not measured. Shares of the peak are then 0.
    """

    layer_parameters: int  # numbers in the matrices of all layers
    head_parameters: int  # numbers in the output matrix
    pair_flops: int  # operations of attention in all layers and heads, for one pair of tokens
    weight_bytes: float  # for each parameter
    kv_token_bytes: int  # keys and values of a token in all layers
    peaks: Peaks | None = None

    @classmethod
    def of(
        cls, config: ModelConfig, *, weight_bytes: float, kv_value_bytes: float, peaks: Peaks | None = None
    ) -> Roofline:
        """Return the costs of the decoder `config`, with the bytes of a weight and of a number in the KV
        cache."""
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = config.num_layers * (2 * queries + 2 * keys)
        # Of experts, the parameters that one token uses. A batch of several tokens reads more of them.
        return cls(
            layer_parameters=config.hidden_size * (attention + 3 * sum(config.active_inner_sizes)),
            head_parameters=config.vocab_size * config.hidden_size,
            pair_flops=4 * config.num_layers * queries,  # two products, each of two operations a number
            weight_bytes=weight_bytes,
            kv_token_bytes=int(config.kv_values_per_token * kv_value_bytes),
            peaks=peaks,
        )

    def cost(self, batch: BatchShape) -> StepCost:
        """Return the operations and bytes of the step.

        The operations for logits count as decode, up to the number of decodes.
        """
        layers, head = 2 * self.layer_parameters, 2 * self.head_parameters
        decode_samples = min(batch.decodes, batch.samples)
        parameters = self.layer_parameters + (self.head_parameters if batch.samples else 0)
        return StepCost(
            prefill_flops=layers * batch.prefill_tokens
            + head * (batch.samples - decode_samples)
            + self.pair_flops * batch.prefill_pairs,
            decode_flops=layers * batch.decodes + head * decode_samples + self.pair_flops * batch.decode_pairs,
            bytes_read=int(parameters * self.weight_bytes) + self.kv_token_bytes * batch.kv_tokens,
            bytes_written=self.kv_token_bytes * (batch.decodes + batch.prefill_tokens),
        )
