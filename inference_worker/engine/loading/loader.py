"""Weights of safetensors files, read tensor by tensor. Pickled checkpoints are never read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from inference_worker.checkpoints.checkpoint import read_tensor_entries
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.checkpoints.safetensors_header import StoredTensor
from inference_worker.contract.process_memory import return_large_objects, trim_heap

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

_LOG_SECONDS = 5.0
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class ProgressLog:
    """A log of the bytes read, with a line every few seconds. Small models are read without a line."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, read_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now - self._last >= _LOG_SECONDS:
            self._last = now
            log.info("weights: %.1f of %.1f GiB read", read_bytes / (1 << 30), total_bytes / (1 << 30))


class Weights:
    """The tensors of a model directory, in the requested dtype and on the requested device. Use it with `with`.

    Files are memory-mapped: a tensor is read by `take`, so the checkpoint is never in memory as a whole. Before and
    after the load, freed memory of the heap is returned to the system. A conversion and a tokenizer leave 200 MB there.
    Copies of matrices are returned when they are freed.

    Args:
        progress: called with the bytes read so far and the bytes of all tensors after each tensor.

    Raises:
        ModelError: a file is missing, damaged or incomplete, or two files have the same tensor.
    """

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._files: list[Any] = []
        self._allocation = ExitStack()
        self._entries: dict[str, tuple[StoredTensor, Any]] = {}
        for path, entries in read_tensor_entries(directory).items():
            try:
                file: Any = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as exc:
                raise ModelError(f"{path}: not a complete safetensors file: {exc}") from None
            self._files.append(file)
            self._entries.update((name, (entry, file)) for name, entry in entries.items())
        self._progress = progress
        self._read: set[str] = set()
        self._read_bytes = 0
        self._total_bytes = sum(entry.num_bytes for entry, _ in self._entries.values())

    def __enter__(self) -> Weights:
        trim_heap()
        self._allocation.enter_context(return_large_objects())
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files:
            file.__exit__(exc_type, exc, traceback)
        self._allocation.close()
        trim_heap()

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has the tensor `name`."""
        return name in self._entries

    def entry(self, name: str) -> StoredTensor | None:
        """Return the stored dtype and shape of the tensor `name`, or None if the checkpoint does not have it."""
        return self._entries[name][0] if name in self._entries else None

    def is_mapped(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether the result of `take` or `take_unconverted` is a part of the mapped file, and not a copy."""
        if name not in self._entries:
            return False
        stored: torch.Tensor = self._entries[name][1].get_tensor(name)
        return stored.data_ptr() == tensor.data_ptr()

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the floating-point tensor `name`.

        Raises:
            ModelError: the tensor is missing, has another shape or is not floating-point.
        """
        return self.take_unconverted(name, shape).to(self.dtype)

    def take_unconverted(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the floating-point tensor `name` in the dtype of the checkpoint.

        Raises:
            ModelError: as `take`.
        """
        return self.read(name, shape, _FLOATS)

    def read(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        """Return the tensor `name` as it is stored.

        Raises:
            ModelError: the tensor is missing, has another shape or is of none of the `dtypes`.
        """
        if name not in self._entries:
            raise ModelError(f"the checkpoint has no tensor {name}")
        entry, file = self._entries[name]
        if entry.shape != shape:
            raise ModelError(f"tensor {name} has the shape {entry.shape}; the configuration requires {shape}")
        try:
            tensor: torch.Tensor = file.get_tensor(name)
        except SafetensorError as exc:
            raise ModelError(f"tensor {name} cannot be read: {exc}") from None
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ModelError(f"tensor {name} is of {tensor.dtype}; want {wanted}")
        if name not in self._read:  # an output matrix can be the embedding
            self._read.add(name)
            self._read_bytes += entry.num_bytes
            if self._progress is not None:
                self._progress(self._read_bytes, self._total_bytes)
        return tensor.to(self.device)
