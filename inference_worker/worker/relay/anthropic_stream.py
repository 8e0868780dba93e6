"""Streams of Anthropic-compatible servers."""

from __future__ import annotations

from typing import Any

import msgspec

from inference_worker.contract.request import FinishReason, RequestOutput, TokenCounts, ToolCallDelta
from inference_worker.contract.upstreams import UpstreamRequest
from inference_worker.worker.relay.decoders import MAX_CALLS, Count, StreamDecoder, read_usage
from inference_worker.worker.relay.failures import broken, error_event

_REASONS: dict[str, FinishReason] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}


class _Writes(msgspec.Struct):
    ephemeral_5m_input_tokens: Count | None = None
    ephemeral_1h_input_tokens: Count | None = None


class _Usage(msgspec.Struct):
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation: _Writes | None = None
    output_tokens_details: dict[str, Any] | None = None


class _Message(msgspec.Struct):
    usage: msgspec.Raw = msgspec.Raw()


class _Block(msgspec.Struct):
    type: str = ""
    name: str = ""
    text: str = ""
    thinking: str = ""
    input: Any = None


class _Delta(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""
    signature: str = ""
    partial_json: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _Event(msgspec.Struct):
    type: str
    index: int = 0
    message: _Message | None = None
    content_block: _Block | None = None
    delta: _Delta | None = None
    usage: msgspec.Raw = msgspec.Raw()
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_usage = msgspec.json.Decoder(_Usage | None).decode


class AnthropicDecoder(StreamDecoder):
    """A decoder of a streamed message."""

    def __init__(self, engine_id: str, request: UpstreamRequest, answers: int, max_tokens: int) -> None:
        super().__init__(engine_id, request, answers, max_tokens)
        self._calls: dict[int, int] = {}  # index of a content block -> number of its call
        self._prompt: TokenCounts | None = None
        self._reported = _Usage()  # the newest of each count
        self._output: int | None = None  # the final number of output tokens

    def decode(self, data: bytes) -> list[RequestOutput]:
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise broken("The model's provider sent a malformed event.") from None
        delta = event.delta or _Delta()
        match event.type:
            case "error":
                raise error_event(event.error)
            case "message_start" if event.message is not None:
                self._start(read_usage(event.message.usage, _decode_usage))
            case "content_block_start" if event.content_block is not None:
                return self._start_block(event.index, event.content_block)
            case "content_block_delta":
                return self._add(event.index, delta)
            case "message_delta":
                self._note_usage(read_usage(event.usage, _decode_usage))
                if delta.stop_reason is not None:
                    self._reasons[0] = _REASONS.get(delta.stop_reason, "stop"), delta.stop_sequence
            case "message_stop":
                self.is_complete = True
        return []

    def usage(self) -> tuple[TokenCounts, Any]:
        if self._prompt is not None and self._output is not None:
            return self._prompt + TokenCounts(output=self._output), "upstream"
        prompt = self._prompt or TokenCounts(uncached=self._estimated_prompt)
        return prompt + TokenCounts(output=self._estimated_output()), "estimated"

    def _start(self, usage: _Usage | None) -> None:
        if usage is not None and usage.input_tokens is not None:
            self._reported = usage
            self._prompt = self._new_prompt = _prompt_counts(usage)

    def _note_usage(self, usage: _Usage | None) -> None:
        if usage is None:
            return
        if usage.input_tokens is not None and (self._prompt is None or usage.input_tokens):
            # The totals, if a server repeats them. It may omit how the cache writes are divided.
            newest = {name: value for name, value in msgspec.structs.asdict(usage).items() if value is not None}
            self._reported = msgspec.structs.replace(self._reported, **newest)
            self._prompt = _prompt_counts(self._reported)
        if usage.output_tokens is not None:
            self._output = usage.output_tokens
        thinking = (usage.output_tokens_details or {}).get("thinking_tokens")
        if isinstance(thinking, int) and thinking >= 0:
            self._reasoning_tokens = thinking

    def _start_block(self, index: int, block: _Block) -> list[RequestOutput]:
        if block.type == "tool_use":
            if not block.name or len(self._calls) == MAX_CALLS:
                raise broken("The model's provider sent a malformed tool call.")
            number = self._calls[index] = len(self._calls)
            arguments = msgspec.json.encode(block.input).decode() if block.input else ""
            return [self._emit(calls=[ToolCallDelta(number, block.name, arguments)])]
        if block.text or block.thinking:
            return [self._emit(block.text, block.thinking)]
        return []

    def _add(self, index: int, delta: _Delta) -> list[RequestOutput]:
        if delta.partial_json:
            if index not in self._calls:
                return []  # of a tool that the provider runs
            return [self._emit(calls=[ToolCallDelta(self._calls[index], "", delta.partial_json)])]
        if delta.signature:
            self._note_extra(len(delta.signature))
            return [RequestOutput(self._engine_id, signature=delta.signature)]
        return [self._emit(delta.text, delta.thinking)] if delta.text or delta.thinking else []

    def _emit(self, text: str = "", reasoning: str = "", calls: list[ToolCallDelta] | None = None) -> RequestOutput:
        return self._content(0, text, reasoning, calls)


def _prompt_counts(usage: _Usage) -> TokenCounts:
    writes = usage.cache_creation or _Writes()
    hour = writes.ephemeral_1h_input_tokens or 0
    minutes = (usage.cache_creation_input_tokens or 0) - hour
    return TokenCounts(usage.input_tokens or 0, usage.cache_read_input_tokens or 0, max(0, minutes), hour)
