"""What a step asks of the device at least: floating-point operations and bytes. Free of torch.

Counted is what the model's mathematics needs: matrix products with the weights (2 operations a parameter and token),
attention over each token's own context, the weights read once a step, keys and values read once a sequence and written
once a token. Activations and what a backend also computes or copies are not, so the shares of the peak that follow
from these are of useful work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from inference_worker.contract.config import ModelConfig


class BatchShape(NamedTuple):
    """What a step's batch amounts to. Of its entries, those that compute one token are decodes, the others prefill."""

    decodes: int
    prefill_tokens: int
    decode_pairs: int  # pairs of a decode's token and one it attends to, itself counted
    prefill_pairs: int
    kv_tokens: int  # lengths of all sequences added up, the new tokens counted
    samples: int  # sequences whose next token is chosen: only for these are logits computed


class StepCost(NamedTuple):
    """What a step asks for."""

    prefill_flops: int
    decode_flops: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a device was seen to do: operations and bytes (read or written) a second."""

    flops: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model's costs on a device.

    `peaks` is None where the device was not measured: then no shares can be told, and they are 0.
    """

    layer_parameters: int  # of matrices, all layers together
    head_parameters: int  # of the matrix that makes logits
    pair_flops: int  # of attention, all layers and heads together, for one pair of tokens
    weight_bytes: float  # for each parameter
    kv_token_bytes: int  # keys and values of a token, all layers together
    peaks: Peaks | None = None

    @classmethod
    def of(
        cls, config: ModelConfig, *, weight_bytes: float, kv_value_bytes: float, peaks: Peaks | None = None
    ) -> Roofline:
        """Return the costs of the dense decoder `config`, with the bytes of a weight and of a number in the KV
        cache."""
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
        return cls(
            layer_parameters=config.num_layers * layer,
            head_parameters=config.vocab_size * config.hidden_size,
            pair_flops=4 * config.num_layers * queries,  # two products, each of two operations a number
            weight_bytes=weight_bytes,
            kv_token_bytes=int(config.kv_values_per_token * kv_value_bytes),
            peaks=peaks,
        )

    def cost(self, batch: BatchShape) -> StepCost:
        """Return the operations and bytes of the step.

        The logits' operations are counted with the decodes, as far as these choose.
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

    def mfu(self, flops: float, seconds: float) -> float:
        """Model FLOPs utilization: operations a second as a share of the peak."""
        return flops / (seconds * self.peaks.flops) if self.peaks and seconds > 0 else 0.0

    def bandwidth_use(self, num_bytes: float, seconds: float) -> float:
        """Bytes a second as a share of the peak."""
        return num_bytes / (seconds * self.peaks.bandwidth) if self.peaks and seconds > 0 else 0.0
