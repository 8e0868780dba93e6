"""Responses in Anthropic's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.messages import AnswerEvent, End, Tokens
from inference_worker.contract.request import ServiceClass, TokenCounts
from millrace.gateway.core.types import ResponseSpec, usage_so_far
from millrace.gateway.protocols.answer_validity import validity
from millrace.gateway.protocols.tool_parsers.base import AnswerText, CallArguments, CallStart, Piece
from millrace.gateway.protocols.tool_parsers.registry import parser_of
from millrace.gateway.protocols.tools import call_id

_TIERS = {ServiceClass.PRIORITY: "priority", ServiceClass.BATCH: "batch"}
_encode = msgspec.json.Encoder().encode


def usage_object(usage: TokenCounts, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Return Anthropic's usage object. Its input_tokens exclude tokens that were read from or written to the cache."""
    return {
        "input_tokens": usage.uncached,
        "cache_creation_input_tokens": usage.cache_write,
        "cache_read_input_tokens": usage.cache_read,
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": min(reasoning_tokens, usage.output)},
    }


class MessagesWriter:
    """A `Writer` for one response."""

    def __init__(self, spec: ResponseSpec, _: Tokenizer) -> None:
        self._spec = spec
        self._parser = parser_of(spec)
        self._is_started = False
        self._prompt: TokenCounts | None = None
        self._output_tokens = self._reasoning_tokens = 0
        self._provider_signature = ""
        self._block = -1  # index of the last content block
        self._open: type[Piece] | Literal["thinking"] | None = None  # its type, while it is open

    def stream(self, event: AnswerEvent) -> list[bytes]:
        if isinstance(event, Tokens):
            self._prompt = event.prompt or self._prompt
            self._output_tokens += len(event.token_ids)
            self._reasoning_tokens += event.reasoning_tokens
            started = self._begin(usage_so_far(self._spec, self._prompt, self._output_tokens))
            started += self._write_reasoning(event.reasoning)
            self._provider_signature += event.signature
            return started + self._write_pieces(self._parser.read(event))
        if not isinstance(event, End):
            return []
        pieces = self._parser.close(is_truncated=event.finish_reason == "length")
        events = self._begin(event.usage) + self._write_pieces(pieces)
        if self._open is not None:
            events += self._stop()
        delta = self._reason(event, bool(self._parser.calls))
        return [
            *events,
            _encode({"type": "message_delta", "delta": delta, "usage": self._usage(event.usage), **validity(event)}),
            _encode({"type": "message_stop"}),
        ]

    def build_response(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        (end,) = (event for event in events if isinstance(event, End))
        parts = [event for event in events if isinstance(event, Tokens)]
        pieces = self._parser.read(*parts) + self._parser.close(is_truncated=end.finish_reason == "length")
        self._provider_signature = "".join(part.signature for part in parts)
        reasoning = "".join(part.reasoning for part in parts)
        self._reasoning_tokens = sum(part.reasoning_tokens for part in parts)
        blocks = self._thinking(reasoning) + self._blocks(pieces)
        calls = any(block["type"] == "tool_use" for block in blocks)
        return self._message(blocks, self._reason(end, calls), end.usage) | validity(end)

    def interrupt(self, code: str, usage: TokenCounts | None) -> list[bytes]:
        if not self._spec.continuous_usage:
            return []
        if usage is None:
            usage = usage_so_far(self._spec, self._prompt, self._output_tokens)
        delta = {"stop_reason": None, "stop_sequence": None}
        return [_encode({"type": "message_delta", "delta": delta, "usage": self._usage(usage)})]

    def _usage(self, usage: TokenCounts) -> dict[str, Any]:
        return usage_object(usage, self._reasoning_tokens)

    def _message(self, content: list[Any], reason: dict[str, Any], usage: TokenCounts) -> dict[str, Any]:
        spec = self._spec
        return {
            "id": f"msg_{spec.request_id.removeprefix('req_')}",
            "type": "message",
            "role": "assistant",
            "model": spec.model,
            "content": content,
            **reason,
            "usage": {
                **self._usage(usage),
                "cache_creation": {
                    "ephemeral_5m_input_tokens": usage.cache_write_5m,
                    "ephemeral_1h_input_tokens": usage.cache_write_1h,
                },
                "service_tier": _TIERS.get(spec.service_class, "standard"),
            },
        }

    def _reason(self, end: End, calls: bool) -> dict[str, Any]:
        if end.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if end.finish_reason == "content_filter":
            return {"stop_reason": "refusal", "stop_sequence": None}
        if isinstance(end.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
        return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}

    def _blocks(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        arguments: dict[int, str] = {}
        for piece in pieces:
            if isinstance(piece, CallStart):
                arguments[piece.number] = ""
                blocks.append(self._call(piece))
            elif isinstance(piece, CallArguments):
                arguments[piece.number] += piece.text
            elif blocks and blocks[-1]["type"] == "text":
                blocks[-1]["text"] += piece.text
            else:
                blocks.append({"type": "text", "text": piece.text})
        calls = [block for block in blocks if block["type"] == "tool_use"]
        for call, text in zip(calls, arguments.values(), strict=True):
            try:
                call["input"] = msgspec.json.decode(text, type=dict[str, Any])
            except (msgspec.MsgspecError, RecursionError):
                blocks.remove(call)  # incomplete: the output limit was reached
        return blocks

    def _thinking(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        thinking = "" if self._is_omitted else text
        return [{"type": "thinking", "thinking": thinking, "signature": self._signature}]

    @property
    def _signature(self) -> str:
        """Return the signature of the thinking block, which clients send back. Only providers check it."""
        return self._provider_signature or call_id(self._spec.request_id, 0, 0, "sig_")

    @property
    def _is_omitted(self) -> bool:
        return self._spec.echoed_parameters.get("thinking_display") == "omitted"

    def _call(self, call: CallStart) -> dict[str, Any]:
        name = call_id(self._spec.request_id, 0, call.number, "toolu_")
        return {"type": "tool_use", "id": name, "name": call.name, "input": {}}

    # Streaming.

    def _begin(self, usage: TokenCounts) -> list[bytes]:
        if self._is_started:
            return []
        self._is_started = True
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return [_encode({"type": "message_start", "message": message})]

    def _write_pieces(self, pieces: list[Piece]) -> list[bytes]:
        events: list[bytes] = []
        for piece in pieces:
            if isinstance(piece, CallArguments):
                events.append(self._delta({"type": "input_json_delta", "partial_json": piece.text}))
                continue
            if self._open is not None and (isinstance(piece, CallStart) or self._open is not AnswerText):
                events += self._stop()
            if isinstance(piece, CallStart):
                events.append(self._start(CallStart, self._call(piece)))
                continue
            if self._open is None:
                events.append(self._start(AnswerText, {"type": "text", "text": ""}))
            events.append(self._delta({"type": "text_delta", "text": piece.text}))
        return events

    def _write_reasoning(self, text: str) -> list[bytes]:
        if not text:
            return []
        events: list[bytes] = []
        if self._open != "thinking":
            events.append(self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""}))
        if not self._is_omitted:
            events.append(self._delta({"type": "thinking_delta", "thinking": text}))
        return events

    def _start(self, piece_type: type[Piece] | Literal["thinking"], block: dict[str, Any]) -> bytes:
        self._block += 1
        self._open = piece_type
        return _encode({"type": "content_block_start", "index": self._block, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._block, "delta": delta}
        if self._spec.continuous_usage:
            event["usage"] = self._usage(usage_so_far(self._spec, self._prompt, self._output_tokens))
        return _encode(event)

    def _stop(self) -> list[bytes]:
        signed = self._open == "thinking"
        self._open = None
        signature = [self._delta({"type": "signature_delta", "signature": self._signature})] if signed else []
        return [*signature, _encode({"type": "content_block_stop", "index": self._block})]
