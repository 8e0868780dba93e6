"""Answers in Anthropic's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from inference_worker.contract.messages import AnswerEvent, End, Tokens
from inference_worker.contract.request import ServiceClass, TokenUsage
from inference_worker.contract.tokenizer import Tokenizer
from millrace.gateway.core.types import ResponseSpec, usage_so_far
from millrace.gateway.protocols.tools import AnswerText, CallArguments, CallStart, Piece, answer_parser, call_id

_TIERS = {ServiceClass.PRIORITY: "priority", ServiceClass.BATCH: "batch"}
_encode = msgspec.json.Encoder().encode


def usage_object(usage: TokenUsage) -> dict[str, Any]:
    """Anthropic's usage: its input_tokens leave out what was read from the cache and what was written to it."""
    return {
        "input_tokens": usage.uncached,
        "cache_creation_input_tokens": usage.cache_write_5m + usage.cache_write_1h,
        "cache_read_input_tokens": usage.cache_read,
        "output_tokens": usage.output,
    }


class MessagesWriter:
    """A `Writer` for one request. Not reusable."""

    def __init__(self, form: ResponseSpec, _: Tokenizer) -> None:
        self._form = form
        self._parser = answer_parser(form.tools)
        self._begun = False
        self._block = -1  # the last one's index
        self._open: type[Piece] | None = None  # what kind of block it is, while it is open

    def stream(self, event: AnswerEvent) -> list[bytes]:
        if isinstance(event, Tokens):
            begun = self._begin(usage_so_far(self._form, event.prompt, len(event.token_ids)))
            return begun + self._written(self._parser.push(event.text))
        if not isinstance(event, End):
            return []
        datas = self._begin(event.usage) + self._written(self._parser.close())
        if self._open is not None:
            datas.append(self._stop())
        delta = self._reason(event, bool(self._parser.calls))
        return [
            *datas,
            _encode({"type": "message_delta", "delta": delta, "usage": usage_object(event.usage)}),
            _encode({"type": "message_stop"}),
        ]

    def whole(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        (end,) = (event for event in events if isinstance(event, End))
        pieces = (
            self._parser.push("".join(event.text for event in events if isinstance(event, Tokens)))
            + self._parser.close()
        )
        blocks = self._blocks(pieces)
        calls = any(block["type"] == "tool_use" for block in blocks)
        return self._message(blocks, self._reason(end, calls), end.usage)

    def _message(self, content: list[Any], reason: dict[str, Any], usage: TokenUsage) -> dict[str, Any]:
        form = self._form
        return {
            "id": f"msg_{form.request_id.removeprefix('req_')}",
            "type": "message",
            "role": "assistant",
            "model": form.model,
            "content": content,
            **reason,
            "usage": {
                **usage_object(usage),
                "cache_creation": {
                    "ephemeral_5m_input_tokens": usage.cache_write_5m,
                    "ephemeral_1h_input_tokens": usage.cache_write_1h,
                },
                "service_tier": _TIERS.get(form.service_class, "standard"),
            },
        }

    def _reason(self, end: End, calls: bool) -> dict[str, Any]:
        if end.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
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
                blocks.remove(call)  # cut off: the answer was not to be longer
        return blocks

    def _call(self, call: CallStart) -> dict[str, Any]:
        name = call_id(self._form.request_id, 0, call.number, "toolu_")
        return {"type": "tool_use", "id": name, "name": call.name, "input": {}}

    # As a stream.

    def _begin(self, usage: TokenUsage) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return [_encode({"type": "message_start", "message": message})]

    def _written(self, pieces: list[Piece]) -> list[bytes]:
        datas: list[bytes] = []
        for piece in pieces:
            if isinstance(piece, CallArguments):
                datas.append(self._delta({"type": "input_json_delta", "partial_json": piece.text}))
                continue
            if self._open is not None and (isinstance(piece, CallStart) or self._open is not AnswerText):
                datas.append(self._stop())
            if isinstance(piece, CallStart):
                datas.append(self._start(CallStart, self._call(piece)))
                continue
            if self._open is None:
                datas.append(self._start(AnswerText, {"type": "text", "text": ""}))
            datas.append(self._delta({"type": "text_delta", "text": piece.text}))
        return datas

    def _start(self, kind: type[Piece], block: dict[str, Any]) -> bytes:
        self._block += 1
        self._open = kind
        return _encode({"type": "content_block_start", "index": self._block, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _encode({"type": "content_block_delta", "index": self._block, "delta": delta})

    def _stop(self) -> bytes:
        self._open = None
        return _encode({"type": "content_block_stop", "index": self._block})
