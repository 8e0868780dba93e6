"""What the decoders of both protocols share: the sequences of a response, its text, and its usage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec

from inference_worker.contract.request import FinishReason, RequestOutput, TokenCounts, ToolCallDelta
from inference_worker.contract.upstreams import UpstreamRequest, UsageSource
from inference_worker.worker.relay.failures import broken

BYTES_PER_TOKEN = 4  # bytes of a token in the own count, where the upstream sends no usage
# Limits of a response. No token of a common vocabulary is longer, and signatures of reasoning are short.
MAX_BYTES_PER_TOKEN = 512
MAX_EXTRA_BYTES = 2**20
CALL_BYTES = 16  # that a tool call counts in addition to its text
MAX_CALLS = 256  # tool calls of a sequence
MAX_STOP_CHARACTERS = 4096  # characters of the stop sequence that the upstream reports


Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]  # number of tokens that an upstream reports
Usage = TypeVar("Usage")


def read_usage(raw: msgspec.Raw, decode: Callable[[msgspec.Raw], Usage | None]) -> Usage | None:
    """Return the usage that an upstream reports; None if it is missing or has anything but counts."""
    try:
        return decode(raw) if bytes(raw) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class StreamDecoder(ABC):
    """A decoder of one response.

    Args:
        answers: the number of sequences.
        max_tokens: of each sequence, as the request limits them.
    """

    def __init__(self, engine_id: str, request: UpstreamRequest, answers: int, max_tokens: int) -> None:
        self._engine_id = engine_id
        self._estimated_prompt = request.estimated_tokens
        self._answers = answers
        self._bytes = 0  # bytes of the text, the reasoning and the calls so far
        self._extra_bytes = 0  # bytes of signatures, and some for each call
        self._max_bytes = answers * max_tokens * MAX_BYTES_PER_TOKEN + MAX_EXTRA_BYTES
        self._reasons: dict[int, tuple[FinishReason, str | None]] = {}  # sequence -> finish and stop reason
        self._usage: TokenCounts | None = None  # the upstream's, once it is known
        self._reasoning_tokens = 0
        self._new_prompt: TokenCounts | None = None  # the prompt's counts, for the next output
        self.is_complete = False

    @abstractmethod
    def decode(self, data: bytes) -> list[RequestOutput]:
        """Return the outputs of an event.

        Raises:
            UpstreamFailed: the event is malformed, or reports an error.
        """

    def finish(self) -> list[RequestOutput]:
        """Return the last outputs, after the end of the stream.

        Raises:
            UpstreamFailed: the response is not complete.
        """
        if not self.is_complete and len(self._reasons) < self._answers:
            raise broken("The model's provider closed the stream before the answer was complete.")
        reasons = [self._reasons.get(index, ("stop", None)) for index in range(self._answers)]
        outputs = [
            RequestOutput(
                self._engine_id, finish_reason=reason, stop_reason=stop and stop[:MAX_STOP_CHARACTERS], index=index
            )
            for index, (reason, stop) in enumerate(reasons)
        ]
        usage, source = self.usage()
        outputs[-1].usage, outputs[-1].usage_source = usage, source
        outputs[-1].reasoning_tokens = min(self._reasoning_tokens, usage.output)
        return outputs

    def usage(self) -> tuple[TokenCounts, UsageSource]:
        """Return the usage so far: the upstream's if it has sent its final usage, else an estimate from the text."""
        if self._usage is not None:
            return self._usage, "upstream"
        return TokenCounts(uncached=self._estimated_prompt, output=self._estimated_output()), "estimated"

    def _estimated_output(self) -> int:
        return -(-self._bytes // BYTES_PER_TOKEN)

    def _note_extra(self, size: int) -> None:
        """Count bytes of the response that are no text, and check its size.

        Raises:
            UpstreamFailed: the response is larger than the request's tokens can be.
        """
        self._extra_bytes += size
        if self._bytes + self._extra_bytes > self._max_bytes:
            raise broken("The model's provider sent more than the request allows.")

    def _content(
        self, index: int, text: str = "", reasoning: str = "", calls: list[ToolCallDelta] | None = None
    ) -> RequestOutput:
        calls = calls or []
        self._bytes += len((text + reasoning).encode(errors="replace"))
        self._bytes += sum(len(call.name) + len(call.arguments.encode(errors="replace")) for call in calls)
        self._note_extra(CALL_BYTES * len(calls))
        prompt, self._new_prompt = self._new_prompt, None
        return RequestOutput(
            self._engine_id, text=text, reasoning=reasoning, index=index, calls=calls, prompt_usage=prompt
        )
