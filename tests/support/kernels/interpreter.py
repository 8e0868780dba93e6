"""Triton kernels on the CPU, run by Triton's interpreter in a separate process.

Triton decides at import whether to compile or to interpret, and the compile-only tests run in this process. So the
interpreter runs in a child process, which receives each call's arguments and returns its result and the arguments' new
values. In the interpreter, bfloat16 is silently wrong: pass float32.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import torch

ROOT = Path(__file__).parents[3]


class Interpreter:
    """`interpreter.paged_decode(…)` calls `kernels.triton.paged_decode` in the child; arguments change in place."""

    def __init__(self) -> None:
        paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.support.kernels.interpreter"]
        self._child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert self._child.stdin and self._child.stdout
            _send(self._child.stdin, (name, args, kwargs))
            result, new_args, new_kwargs = _receive(self._child.stdout)
            for old, new in zip((*args, *kwargs.values()), (*new_args, *new_kwargs.values()), strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)
            if isinstance(result, Exception):
                raise result
            return result

        return call

    def close(self) -> None:
        """End the child process."""
        assert self._child.stdin
        self._child.stdin.close()
        self._child.wait(timeout=10)


class _Pickler(pickle.Pickler):
    """A pickler of tensors. PyTorch does not pickle tensors in 8-bit floating-point numbers that are views of bytes."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn:
            return torch.Tensor.view, (value.contiguous().view(torch.uint8), value.dtype)
        return NotImplemented


def _send(stream: BinaryIO, message: object) -> None:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(message)
    body = buffer.getvalue()
    stream.write(struct.pack("<Q", len(body)) + body)
    stream.flush()


def _receive(stream: BinaryIO) -> Any:
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError("the interpreter's process died: a kernel read or wrote outside its tensors?")
    (length,) = struct.unpack("<Q", header)
    return pickle.loads(stream.read(length))  # noqa: S301 (from our own child)


def _serve() -> None:
    import kernels.triton

    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of a kernel must not mix with the results
    while source.peek(1):
        name, args, kwargs = _receive(source)
        try:
            result: object = getattr(kernels.triton, name)(*args, **kwargs)
        except Exception as exc:  # noqa: BLE001 (it belongs to the caller, who raises it)
            result = exc
        _send(sink, (result, args, kwargs))


if __name__ == "__main__":
    _serve()
