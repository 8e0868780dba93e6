"""What the decoders of both protocols share: the sequences of a response, its text, and its usage."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from inference_worker.contract.request import FinishReason, RequestOutput, TokenCounts, ToolCallDelta
from inference_worker.contract.upstreams import UpstreamRequest, UsageSource
from inference_worker.worker.relay.failures import UpstreamFailed, make_finish_failure, make_upstream_failure

BYTES_PER_TOKEN = 4  # bytes of a token in the own count, where the upstream sends no usage
# Limits of a response. No token of a common vocabulary is longer, and signatures of reasoning are short.
MAX_BYTES_PER_TOKEN = 512
MAX_EXTRA_BYTES = 2**20
CALL_BYTES = 16  # bytes of a tool call in addition to its text
MAX_CALLS = 256  # tool calls of a sequence
MAX_STOP_CHARACTERS = 4096  # characters of the stop sequence that the upstream reports


MAX_COUNT = 2**31  # tokens that an upstream can report
# The reasons with which servers end an answer, in lower case and with underscores: those of OpenAI, Anthropic, Google,
# Mistral, Cohere, DeepSeek, Zhipu, Together, TGI, vLLM, SGLang and llama.cpp. Others are failures, such as
# `network_error`, `insufficient_system_resource`, `abort` and `malformed_function_call`.
_STOPS = """stop stopped stop_sequence stop_token stop_string end end_turn eos eos_token eot complete completed finished
    normal tool_call tool_calls tool_use function_call function_calls"""
_LENGTHS = """length max_length max_tokens max_output_tokens max_new_tokens model_length context_length length_limit
    token_limit limit pause_turn model_context_window_exceeded"""
_FILTERS = """content_filter content_filtered sensitive safety recitation blocklist prohibited_content spii image_safety
    refusal error_toxic guardrail guardrail_intervened moderation"""
FINISH_REASONS: Mapping[str, FinishReason] = {
    **dict.fromkeys(_STOPS.split(), "stop"),
    **dict.fromkeys(_LENGTHS.split(), "length"),
    **dict.fromkeys(_FILTERS.split(), "content_filter"),
}


def read_object(raw: msgspec.Raw) -> dict[str, Any]:
    """Return the object in a JSON text; an empty one if it is missing or anything else."""
    try:
        decoded = msgspec.json.decode(raw) if bytes(raw) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def read_part(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object in another one; an empty one if it is missing or anything else."""
    part = fields.get(name)
    return part if isinstance(part, dict) else {}


def read_count(value: Any) -> int | None:
    """Return the number of tokens that an upstream reports as a number or as a text; None if it is neither."""
    if isinstance(value, str) and len(value) < 20 and value.isascii() and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT
    return int(value) if is_count else None


def merge_counts(known: dict[str, int], reported: Mapping[str, Any]) -> None:
    """Add reported counts to those that are known. A zero does not replace a count."""
    for name, value in reported.items():
        count = read_count(value)
        if count is not None and (count or name not in known):
            known[name] = count


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
        self._failure: UpstreamFailed | None = None  # with which an answer has ended
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
        if self._failure is not None:
            raise self._failure
        if not self.is_complete and len(self._reasons) < self._answers:
            raise make_upstream_failure("The model's provider closed the stream before the answer was complete.")
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

    @abstractmethod
    def usage(self) -> tuple[TokenCounts, UsageSource]:
        """Return the usage so far: the upstream's if it has sent its final usage.

        What it has not sent is estimated from the text. The source is `estimated` then.
        """

    def _note_finish(self, index: int, reason: str, stop: str | None) -> None:
        """Record the reason with which a sequence ends. A reason that is not known is a failure."""
        name = re.sub(r"[^a-z]+", "_", reason.lower()).strip("_").removeprefix("finish_reason_")
        if name in FINISH_REASONS:
            self._reasons[index] = FINISH_REASONS[name], stop
        else:
            self._failure = make_finish_failure(reason)

    def _estimated_output(self) -> int:
        return -(-self._bytes // BYTES_PER_TOKEN)

    def _note_extra(self, size: int) -> None:
        """Count bytes of the response that are no text, and check its size.

        Raises:
            UpstreamFailed: the response is larger than the request's tokens can be.
        """
        self._extra_bytes += size
        if self._bytes + self._extra_bytes > self._max_bytes:
            raise make_upstream_failure("The model's provider sent more than the request allows.")

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
