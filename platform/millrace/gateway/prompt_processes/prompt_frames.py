"""Frames between the gateway and its prompt processes: msgpack in pipes, each frame after its length.

A body is sent as it came, as a frame of its own. Nothing that is decoded here can be more than data.
"""

from __future__ import annotations

import struct
from array import array

import msgspec

from inference_worker.contract.request import CacheBreakpoint
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, Prompt

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 * 2**20


class ModelFiles(msgspec.Struct, frozen=True):
    """A deployment, as a prompt process loads it."""

    name: str
    folder: str
    context_length: int
    vocab_size: int
    vector_sizes: tuple[int, ...]


class Target(msgspec.Struct, frozen=True, array_like=True):
    """The deployment that a name's prompts are tokenized for."""

    deployment: str
    longest: int  # the longest context among the name's deployments


class PromptTask(msgspec.Struct, frozen=True):
    """A body to read."""

    reader: str
    names: dict[str, Target]  # the names that the caller may use
    deployment: str | None = None  # instead of the name's own


class PackedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A tokenized prompt."""

    ids: bytes
    breakpoints: tuple[CacheBreakpoint, ...]
    input_lengths: tuple[int, ...]

    @classmethod
    def pack(cls, prompt: Prompt) -> PackedPrompt:
        return cls(array("I", prompt.ids).tobytes(), prompt.breakpoints, prompt.input_lengths)

    def unpack(self) -> Prompt:
        ids = array("I")
        ids.frombytes(self.ids)
        return Prompt(ids.tolist(), self.breakpoints, self.input_lengths)


class Problem(msgspec.Struct, frozen=True):
    """An `ApiError`."""

    code: str
    message: str
    param: str | None

    def error(self) -> ApiError:
        return ApiError(self.code, self.message, self.param)


class Result(msgspec.Struct, frozen=True):
    """What became of a body, and how much memory the process has."""

    resident_bytes: int
    problem: Problem | None = None
    request: InferenceRequest | None = None  # without its prompts
    deployment: str | None = None  # that the prompts were tokenized for; None: the caller may not use the name
    prompts: tuple[PackedPrompt, ...] = ()
