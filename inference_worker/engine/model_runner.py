"""The execution of a step's batch: index tensors, forward pass and sampling."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain

import torch

from inference_worker.checkpoints.checkpoint import read_tensor_entries
from inference_worker.checkpoints.draft_check import read_draft_config
from inference_worker.checkpoints.model_config import ModelConfig
from inference_worker.contract.compute_support import SlowReason
from inference_worker.contract.engine_config import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_KV_BYTES,
    DEFAULT_KV_SHARE,
    EngineConfig,
)
from inference_worker.engine.architectures import load_model
from inference_worker.engine.architectures.layers import Layers
from inference_worker.engine.attention.base import CacheShape, StepMetadata
from inference_worker.engine.attention.grouped import GroupedBackend
from inference_worker.engine.attention.registry import make_backend
from inference_worker.engine.batch import PersistentBatch
from inference_worker.engine.capacity.layer_groups import group_layers
from inference_worker.engine.capacity.peaks import measure_peaks
from inference_worker.engine.capacity.roofline import Roofline
from inference_worker.engine.capacity.sizing import (
    KVSizing,
    draft_kv_bytes,
    kv_cache_bytes,
    kv_number_bytes,
    size_kv_cache,
)
from inference_worker.engine.compute_path import choose_path
from inference_worker.engine.device import free_memory
from inference_worker.engine.kv_cache.block_copies import BlockCopies
from inference_worker.engine.loading.loader import ProgressLog
from inference_worker.engine.quantization.linear_weights import LinearWeights
from inference_worker.engine.sampling.logprobs import RankedTokens, prompt_logprobs
from inference_worker.engine.sampling.sampler import Sampled, Sampler
from inference_worker.engine.sequences.runner import LaunchedStep, StepResult
from inference_worker.engine.sequences.step import ScheduledSequence, SchedulerOutput
from inference_worker.engine.tensors import mark, upload_all

log = logging.getLogger(__name__)


class ModelRunner:
    """A model with its KV cache on one device."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        max_model_len: int,
        eos_token_ids: Collection[int] | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = model_config.vocab_size
        path = choose_path(config, checkpoint=model_config.dtype)
        self.device, self.dtype, kernels = path.device, path.dtype, path.kernels
        self.async_scheduling = (
            self.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
        )
        draft, draft_weights = self._read_draft()
        self.draft_kv_bytes = 0  # left for the KV cache of the draft model
        memory = config.kv_cache_memory
        if memory is None and self.device.type == "cuda":
            memory = DEFAULT_KV_SHARE

        def size_cache() -> KVSizing:
            num_bytes = DEFAULT_KV_BYTES
            if memory is not None:
                num_bytes = kv_cache_bytes(memory, free_memory(self.device) - draft_weights, self.device.type)
            size = kv_number_bytes(config.kv_cache_dtype, self.dtype.itemsize)
            if draft is not None:
                self.draft_kv_bytes = draft_kv_bytes(
                    model_config, draft, config.block_size, max_model_len, size, num_bytes
                )
            return size_kv_cache(config, model_config, max_model_len, size, num_bytes - self.draft_kv_bytes)

        if not isinstance(memory, float):
            size_cache()  # an error before the model is loaded
        self._sampler = Sampler(
            model_config.eos_token_ids if eos_token_ids is None else eos_token_ids,
            max_rows=1 if config.batch_invariant else None,
            kernels=kernels,
        )
        with torch.inference_mode():
            with LinearWeights(
                config.model_dir,
                self.dtype,
                self.device,
                model_config.checkpoint_format,
                config.quantization,
                config.progress or ProgressLog(),
            ) as weights:
                limited = replace(model_config, max_model_len=max_model_len)
                layers = Layers(batch_invariant=config.batch_invariant, kernels=kernels)
                self.model = load_model(limited, weights, layers)
                if layers.quantized or layers.dequantized:
                    log.info(
                        "quantized weights: %d products kept, %d converted to %s", layers.quantized, layers.dequantized,
                        self.dtype,
                    )  # fmt: skip
            sizing = size_cache()
            log.info("KV cache: %s", sizing)
            self.num_blocks = sizing.num_blocks
            groups = group_layers(model_config.windows, model_config.num_layers, max_model_len)
            shape = CacheShape(
                num_layers=groups.layers_per_block,
                num_blocks=self.num_blocks + 1,  # block 0 is padding
                block_size=config.block_size,
                num_kv_heads=model_config.num_kv_heads,
                head_dim=model_config.head_dim,
                dtype=self.dtype,
                device=self.device,
                places=groups.places,
                kv_dtype=config.kv_cache_dtype,
                kernels=kernels,
            )
            name = "invariant" if config.batch_invariant else config.attention
            specs = self.model.attention_specs
            self.attention, self.attention_choice = make_backend(name, shape, model_config.num_heads, specs)
            if len(groups.windows) > 1:
                self.attention = GroupedBackend(self.attention, groups.groups)
            self.num_host_blocks = config.kv_offload_bytes // sizing.block_bytes
            self._copies = BlockCopies(self.attention.pages(), self.num_host_blocks)
        self.restore_seconds = self._copies.restore_seconds
        self._last_tokens = torch.empty(0, dtype=torch.int32, device=self.device)  # sampled by the last step
        max_blocks = sizing.demand.blocks_per_group(max_model_len)
        self._batch = PersistentBatch(config.max_num_seqs, max_blocks, config.block_size, len(groups.windows))
        peaks = measure_peaks(self.device, self.dtype) if config.measure_peaks else None
        size = kv_number_bytes(config.kv_cache_dtype, self.dtype.itemsize)
        self.roofline = Roofline.of(
            model_config, weight_bytes=layers.bytes_per_parameter, kv_value_bytes=size, peaks=peaks
        )
        kv_type = path.dtype_name if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        weight_type = path.dtype_name if config.quantization == "none" else config.quantization
        self.slow = path.slow or self._find_slow_part(layers)
        self.computes_with = path.describe(weight_type, self.attention_choice.name, kv_type)
        log.info("%s", self.computes_with)

    def _find_slow_part(self, layers: Layers) -> SlowReason | None:
        """Return why a part of the model uses a slower backend than the machine's default, or None."""
        if self.attention_choice.fallback in ("mismatch", "error"):
            return SlowReason.ATTENTION
        if self.attention_choice.fallback and self.config.block_size % DEFAULT_BLOCK_SIZE:
            return SlowReason.BLOCK_SIZE
        return SlowReason.SHAPE if self.attention_choice.fallback or layers.unsupported else None

    def _read_draft(self) -> tuple[ModelConfig | None, int]:
        """Return the configuration of the draft model, if it will be used, and the bytes of its weights."""
        config = self.config
        if config.draft_model_dir is None or not config.speculation or self.async_scheduling:
            return None, 0
        model = read_draft_config(config.model_dir, config.draft_model_dir)
        tensors = chain.from_iterable(file.values() for file in read_tensor_entries(config.draft_model_dir).values())
        return model, sum(max(each.num_bytes, math.prod(each.shape) * self.dtype.itemsize) for each in tensors)

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Launch a step on the device, including the copy of its result to the host.

        `launch` does not wait for the device. A decode whose previous token is in flight reads it on the device. If
        sampling needs that token on the host, for a grammar or a reasoning budget, it is left to `LaunchedStep.sample`.
        """
        self._copies.run(output.operations)
        inputs = self._batch.update(output)
        token_ids, positions, slots, query_start_loc, seq_lens, block_table, sampled = upload_all(
            inputs.arrays(), self.device
        )
        if inputs.has_in_flight:
            previous = self._last_tokens.index_select(0, (-1 - token_ids).clamp_(min=0))
            token_ids = torch.where(token_ids < 0, previous, token_ids)
        metadata = StepMetadata(
            num_seqs=len(inputs.lengths),
            num_tokens=output.num_tokens,
            num_decodes=output.num_decodes,
            query_lens=inputs.query_lens,
            lengths=inputs.lengths,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=slots,
            positions=positions,
        )
        self.attention.prepare(metadata)
        hidden = self.model.forward(token_ids, self.attention, metadata)
        prompts = prompt_logprobs(output.scheduled, hidden, self.model.logits, self.vocab_size)
        selected = hidden if len(sampled) == len(hidden) else hidden.index_select(0, sampled)
        step = _Step(self, output, self.model.logits(selected) if len(sampled) else selected, prompts)
        if not any(s.in_flight and s.seq.needs_history for s in output.scheduled):
            step.sample()
        return step

    def sample(self, logits: torch.Tensor, entries: Sequence[ScheduledSequence]) -> Sampled:
        """Sample the tokens of the entries, from the logits of each and of its drafts."""
        positions = [s.start + s.num_known_tokens for s in entries]
        drafts = [s.drafts for s in entries]
        sampled = self._sampler.sample(logits, [s.seq for s in entries], positions, drafts)
        self._last_tokens = sampled.tokens
        return sampled


class _Step:
    """A launched step of a `ModelRunner`.

    Args:
        logits: of the entries that sample a token.
        prompts: log-probabilities of prompt tokens, by index in the batch.
    """

    def __init__(
        self, runner: ModelRunner, output: SchedulerOutput, logits: torch.Tensor, prompts: dict[int, RankedTokens]
    ) -> None:
        self._runner = runner
        self._entries = [s for s in output.scheduled if s.samples]
        self._logits = logits
        self._prompts = prompts
        self._wait: Callable[[], None] | None = None  # set when the result's copies have started
        self._sampled = Sampled(torch.empty(0, dtype=torch.int32))

    @torch.inference_mode()
    def sample(self) -> None:
        if self._wait is not None:
            return
        if self._entries:
            self._sampled = self._runner.sample(self._logits, self._entries).download()
        self._prompts = {place: ranked.download() for place, ranked in self._prompts.items()}
        self._wait = mark(self._runner.device)

    def read(self) -> StepResult:
        if self._wait is None:
            raise RuntimeError("the step was not sampled")
        self._wait()
        tokens, logprobs = self._sampled.read()
        result = StepResult(prompt_logprobs={place: ranked.read() for place, ranked in self._prompts.items()})
        start = 0
        for index, count in enumerate(self._sampled.counts or [1] * len(tokens)):
            result.tokens.append(tokens[start : start + count])
            if start in logprobs:
                result.logprobs[index] = [logprobs[i] for i in range(start, start + count)]
            start += count
        return result
