"""Messages between the gateway and its prompt processes: msgpack frames in pipes, each after its length.

A body is sent unchanged in a frame of its own. Decoding a frame creates only data, never code.
"""

from __future__ import annotations

import struct
from array import array

import msgspec

from inference_worker.checkpoints.template_probe import TemplateTraits
from inference_worker.contract.request import CacheBreakpoint, ReasoningSpec
from inference_worker.contract.upstreams import UpstreamRequest, UpstreamSpec
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, Prompt

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 * 2**20


class ModelFiles(msgspec.Struct, frozen=True):
    """A deployment with the files that a prompt process loads."""

    name: str
    directory: str
    context_length: int
    vocab_size: int
    vector_sizes: tuple[int, ...]
    is_cross_encoder: bool
    input_prompt: str
    pair_template: str | None
    tool_parser: str
    reasoning_parser: str
    version: str = ""
    upstream: UpstreamSpec | None = None
    separates_contents: bool = True
    truncates_inputs: bool = True


class PromptTarget(msgspec.Struct, frozen=True, array_like=True):
    """The deployment whose tokenizer is used for a model name."""

    deployment: str  # deployment key
    max_tokens: int  # the longest prompt that is accepted, by the contexts of the name's deployments
    deployment_with_images: str = ""  # deployment key, used instead for a request with images


class PromptTask(msgspec.Struct, frozen=True):
    """The instructions for reading a body."""

    reader: str
    names: dict[str, PromptTarget]  # the model names that the key may use
    deployment: str | None = None  # deployment key, used instead of the name's deployment
    fits_tokens: int | None = None  # conversations are shortened to this number of tokens
    summary: str = ""  # summary of the messages that are dropped
    summarizes: int = 0  # instead: the prompt requests the summary of this number of messages
    measures_template: bool = False  # instead: the chat template of the deployment is measured
    semantic_names: tuple[str, ...] = ()  # model names whose answers similar questions may receive


class PackedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A tokenized prompt."""

    ids: bytes
    breakpoints: tuple[CacheBreakpoint, ...]
    input_lengths: tuple[int, ...]
    second_starts: tuple[int, ...]
    reasoning: ReasoningSpec | None
    prediction: tuple[int, ...] = ()
    upstream: UpstreamRequest | None = None
    ignored: tuple[str, ...] | None = None
    dropped_messages: int = 0
    searches: int = 0
    truncated_inputs: int = 0

    @classmethod
    def pack(cls, prompt: Prompt) -> PackedPrompt:
        ids = array("I", prompt.ids).tobytes()
        return cls(
            ids,
            prompt.breakpoints,
            prompt.input_lengths,
            prompt.second_starts,
            prompt.reasoning,
            prompt.prediction,
            prompt.upstream,
            prompt.ignored,
            prompt.dropped_messages,
            prompt.searches,
            prompt.truncated_inputs,
        )

    def unpack(self) -> Prompt:
        ids = array("I")
        ids.frombytes(self.ids)
        return Prompt(
            ids.tolist(),
            self.breakpoints,
            self.input_lengths,
            self.second_starts,
            self.reasoning,
            self.prediction,
            self.upstream,
            self.ignored,
            self.dropped_messages,
            self.searches,
            self.truncated_inputs,
        )


class Problem(msgspec.Struct, frozen=True):
    """An `ApiError` as data."""

    code: str
    message: str
    param: str | None

    def error(self) -> ApiError:
        return ApiError(self.code, self.message, self.param)


class Result(msgspec.Struct, frozen=True):
    """The result for a body, and the memory use of the process."""

    resident_bytes: int
    problem: Problem | None = None
    request: InferenceRequest | None = None  # with placeholders for its prompts
    deployment: str | None = None  # deployment whose tokenizer was used; None: the key may not use the name
    prompts: tuple[PackedPrompt, ...] = ()
    is_template_cheap: bool = False
    template_traits: TemplateTraits | None = None
