"""The attention backend for CUDA GPUs, on the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inference_worker.engine.attention.base import AttentionBackend, AttentionSpec, CacheShape, StepMetadata
from kernels import triton as kernels


@dataclass(frozen=True, slots=True)
class _Plan:
    decode: kernels.DecodePlan | None
    workspace: tuple[torch.Tensor, torch.Tensor] | None
    starts: torch.Tensor  # start of each chunk after the decodes, counted from the first chunk
    longest: int  # new tokens of the longest chunk; 0 without one


class TritonBackend(AttentionBackend):
    """A backend with at most four launches per layer: write, decode, combine, prefill."""

    def __init__(self, shape: CacheShape, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        super().__init__(shape, num_heads, specs)
        pages = (shape.num_layers, shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        is_fp8 = shape.kv_dtype == "fp8"  # stored as bytes: PyTorch does not copy blocks of this type
        self._keys = torch.zeros(pages, dtype=torch.uint8 if is_fp8 else shape.dtype, device=shape.device)
        self._values = torch.zeros_like(self._keys)
        dtype = torch.float8_e4m3fn if is_fp8 else shape.dtype
        self.key_cache = shape.by_layer(self._keys.view(dtype).unbind(0))
        self.value_cache = shape.by_layer(self._values.view(dtype).unbind(0))
        cuda = shape.device.type == "cuda"
        self._num_sms = torch.cuda.get_device_properties(shape.device).multi_processor_count if cuda else 1

    def pages(self) -> list[torch.Tensor]:
        return [self._keys.transpose(0, 1), self._values.transpose(0, 1)]

    def prepare(self, metadata: StepMetadata) -> None:
        decodes, shape, device = metadata.num_decodes, self.shape, self.shape.device
        plan = workspace = None
        if decodes:
            plan = kernels.plan_decode(decodes, shape.num_kv_heads, max(metadata.lengths[:decodes]), self._num_sms)
            workspace = kernels.decode_workspace(decodes, self.num_heads, shape.head_dim, plan, device)
        metadata.plan = _Plan(
            decode=plan,
            workspace=workspace,
            starts=metadata.query_start_loc[decodes:] - decodes,
            longest=max(metadata.query_lens[decodes:], default=0),
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: StepMetadata
    ) -> torch.Tensor:
        plan: _Plan = metadata.plan
        decodes, spec = metadata.num_decodes, self.specs[layer]
        pages = self.key_cache[layer], self.value_cache[layer]
        kernels.write_cache(key, value, *pages, metadata.slot_mapping)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if plan.decode:
            kernels.paged_decode(
                query[:decodes], *pages, metadata.block_table[:decodes], metadata.seq_lens[:decodes], spec.scale,
                plan.decode, window=spec.window, soft_cap=spec.soft_cap, out=out[:decodes], workspace=plan.workspace,
            )  # fmt: skip
        if plan.longest:
            kernels.paged_prefill(
                query[decodes:], *pages, metadata.block_table[decodes:], metadata.seq_lens[decodes:], plan.starts,
                spec.scale, plan.longest, window=spec.window, soft_cap=spec.soft_cap, out=out[decodes:],
            )  # fmt: skip
        return out.flatten(1)
