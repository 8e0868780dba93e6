"""A fake device stream: copies to the host happen when the host waits for them, as late as a device may do them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from inference_worker.engine import model_runner, tensors
from inference_worker.engine.sampling import logprobs, penalties, sampler

_POISON = 0x7F  # of bytes that must not be read


class DeviceStream:
    """A replacement for `download`, `mark` and `upload_all` of the runner.

    A copy to the host has no valid content until a later mark was waited for. A host buffer is overwritten after its
    copy to the device. `events` are the numbered launches, copies and reads in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self._queue: list[Callable[[], object]] = []
        self._marks = 0
        for module in (sampler, logprobs):
            monkeypatch.setattr(module, "download", self._download)
        monkeypatch.setattr(model_runner, "mark", self._mark)
        monkeypatch.setattr(penalties, "is_host", lambda device: False)
        monkeypatch.setattr(model_runner, "upload_all", self._upload_all)

    def attach(self, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Record the launches of `runner`, a `ModelRunner`."""
        forward = runner.model.forward

        def record(*args: Any) -> torch.Tensor:
            self.events.append(f"launch {1 + sum(event.startswith('launch') for event in self.events)}")
            result: torch.Tensor = forward(*args)
            return result

        monkeypatch.setattr(runner.model, "forward", record)

    def _download(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.full((tensor.numel() * tensor.itemsize,), _POISON, dtype=torch.uint8)
        host = host.view(tensor.dtype).view(tensor.shape)
        self._queue.append(lambda: np.copyto(host.numpy(), tensor.numpy()))
        return host

    def _mark(self, device: torch.device) -> Callable[[], None]:
        self._marks += 1
        number, queued = self._marks, list(self._queue)
        self.events.append(f"copy {number}")

        def wait() -> None:
            for copy in queued:
                copy()
            self.events.append(f"read {number}")

        self._queue.clear()
        return wait

    def _upload_all(self, arrays: Sequence[tensors.Array], device: torch.device) -> list[torch.Tensor]:
        buffer = torch.empty(tensors.packed_size(arrays), dtype=torch.uint8)
        tensors.pack(arrays, buffer)
        views = tensors.unpack(buffer.clone(), arrays)
        buffer.fill_(_POISON)
        for array in arrays:
            array.view("uint8").fill(_POISON)
        return views
