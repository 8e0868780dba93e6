"""Streams of Anthropic-compatible servers."""

from __future__ import annotations

from typing import Any

import msgspec

from inference_worker.contract.request import RequestOutput, TokenCounts, ToolCallDelta
from inference_worker.contract.upstreams import UpstreamRequest, UsageSource
from inference_worker.worker.relay.decoders import MAX_CALLS, StreamDecoder, merge_counts, read_object, read_part
from inference_worker.worker.relay.failures import error_event, make_upstream_failure


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


_COUNTS = frozenset(
    {
        "input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens",
        "ephemeral_1h_input_tokens", "thinking_tokens",
    }
)  # fmt: skip
_decode_event = msgspec.json.Decoder(_Event).decode


class AnthropicDecoder(StreamDecoder):
    """A decoder of a streamed message."""

    def __init__(self, engine_id: str, request: UpstreamRequest, answers: int, max_tokens: int) -> None:
        super().__init__(engine_id, request, answers, max_tokens)
        self._calls: dict[int, int] = {}  # index of a content block -> number of its call
        self._reported: dict[str, int] = {}  # counts of the upstream
        self._is_final = False  # whether the number of output tokens is the final one

    def decode(self, data: bytes) -> list[RequestOutput]:
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise make_upstream_failure("The model's provider sent a malformed event.") from None
        delta = event.delta or _Delta()
        match event.type:
            case "error":
                raise error_event(event.error)
            case "message_start" if event.message is not None:
                self._note_usage(event.message.usage, is_final=False)
            case "content_block_start" if event.content_block is not None:
                return self._start_block(event.index, event.content_block)
            case "content_block_delta":
                return self._add(event.index, delta)
            case "message_delta":
                self._note_usage(event.usage, is_final=True)
                if delta.stop_reason is not None:
                    self._note_finish(0, delta.stop_reason, delta.stop_sequence)
            case "message_stop":
                self.is_complete = True
        return []

    def usage(self) -> tuple[TokenCounts, UsageSource]:
        prompt = self._prompt()
        output = self._reported.get("output_tokens", 0) if self._is_final else 0
        if prompt is None or not output:
            prompt = prompt or TokenCounts(uncached=self._estimated_prompt)
            return prompt + TokenCounts(output=output or self._estimated_output()), "estimated"
        return prompt + TokenCounts(output=output), "upstream"

    def _prompt(self) -> TokenCounts | None:
        """Return the reported tokens of the prompt; None if there are none."""
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        if not any(self._reported.get(name) for name in names):
            return None
        uncached, read, written = (self._reported.get(name, 0) for name in names)
        hour = self._reported.get("ephemeral_1h_input_tokens", 0)
        return TokenCounts(uncached, read, max(0, written - hour), hour)

    def _note_usage(self, raw: msgspec.Raw, *, is_final: bool) -> None:
        """Record the newest of each count. A server that repeats the totals may omit how cache writes are divided."""
        usage = read_object(raw)
        before = self._prompt()
        counts = {**usage, **read_part(usage, "cache_creation"), **read_part(usage, "output_tokens_details")}
        if not is_final:
            counts.pop("output_tokens", None)  # those of the first event
        merge_counts(self._reported, {name: value for name, value in counts.items() if name in _COUNTS})
        if before is None:
            self._new_prompt = self._prompt()
        self._is_final = self._is_final or (is_final and "output_tokens" in self._reported)
        self._reasoning_tokens = self._reported.get("thinking_tokens", 0)

    def _start_block(self, index: int, block: _Block) -> list[RequestOutput]:
        if block.type == "tool_use":
            if not block.name or len(self._calls) == MAX_CALLS:
                raise make_upstream_failure("The model's provider sent a malformed tool call.")
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
