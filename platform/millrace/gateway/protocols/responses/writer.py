"""Responses in the format of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.messages import AnswerEvent, End, Tokens
from inference_worker.contract.request import FinishReason, TokenCounts
from millrace.gateway.core.types import ResponseSpec, usage_so_far
from millrace.gateway.protocols.answer_validity import validity
from millrace.gateway.protocols.openai.writer import TIERS
from millrace.gateway.protocols.tool_parsers.base import CallArguments, CallStart, Piece
from millrace.gateway.protocols.tool_parsers.registry import parser_of
from millrace.gateway.protocols.tools import call_id

_encode = msgspec.json.Encoder().encode
Event = dict[str, Any]


def usage_object(usage: TokenCounts, reasoning_tokens: int = 0, end: End | None = None) -> dict[str, Any]:
    """Return the usage object.

    Args:
        end: of a complete response. It has the numbers of accepted and rejected draft tokens.
    """
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cache_read, "cache_write_tokens": usage.cache_write},
        "output_tokens": usage.output,
        "output_tokens_details": {
            "reasoning_tokens": min(reasoning_tokens, usage.output),
            "accepted_prediction_tokens": end.accepted_drafts if end else 0,
            "rejected_prediction_tokens": end.rejected_drafts if end else 0,
        },
        "total_tokens": usage.total,
    }


def response_id(request_id: str) -> str:
    return f"resp_{request_id.removeprefix('req_')}"


class ResponsesWriter:
    """A `Writer` for one response."""

    def __init__(self, spec: ResponseSpec, _: Tokenizer) -> None:
        self._spec = spec
        self._parser = parser_of(spec)
        self._sequence = 0
        self._is_started = False
        self._prompt: TokenCounts | None = None
        self._output_tokens = 0
        self._reasoning_tokens = 0
        self._items: list[dict[str, Any]] = []  # the output's items; the last one may be open
        self._open = False

    def stream(self, event: AnswerEvent) -> list[bytes]:
        return [self._encode_numbered(item) for item in self._events(event)]

    def build_response(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        written = [item for event in events for item in self._events(event)]
        response: dict[str, Any] = written[-1]["response"]
        return response

    def interrupt(self, code: str, usage: TokenCounts | None) -> list[bytes]:
        if not self._spec.continuous_usage:
            return []
        if usage is None:
            usage = usage_so_far(self._spec, self._prompt, self._output_tokens)
        failed = self._response("failed", None)
        failed |= {"error": {"code": "server_error", "message": f"The response ended with the error {code}."}}
        failed |= {"output": self._items, "usage": usage_object(usage, self._reasoning_tokens)}
        return [self._encode_numbered({"type": "response.failed", "response": failed})]

    def _encode_numbered(self, event: Event) -> bytes:
        self._sequence += 1
        return _encode({**event, "sequence_number": self._sequence - 1})

    def _events(self, event: AnswerEvent) -> list[Event]:
        if not isinstance(event, Tokens | End):
            return []
        events: list[Event] = []
        if not self._is_started:
            self._is_started = True
            response = self._response("in_progress", None)
            events += [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]
        if isinstance(event, Tokens):
            self._prompt = event.prompt or self._prompt
            self._output_tokens += len(event.token_ids)
            self._reasoning_tokens += event.reasoning_tokens
            events += self._write_reasoning(event.reasoning)
            events += self._write_pieces(self._parser.read(event))
            return self._with_usage(events) if self._spec.continuous_usage else events
        events += self._write_pieces(self._parser.close(is_truncated=event.finish_reason == "length"))
        if not self._items:  # an empty completion is also a message
            events += self._add_message()
        status = _status(event.finish_reason)
        events += self._close(status)
        return [*events, {"type": f"response.{status}", "response": self._response(status, event)}]

    def _with_usage(self, events: list[Event]) -> list[Event]:
        so_far = usage_so_far(self._spec, self._prompt, self._output_tokens)
        usage = usage_object(so_far, self._reasoning_tokens)
        return [{**event, "usage": usage} if event["type"].endswith(".delta") else event for event in events]

    def _response(self, status: str, end: End | None) -> dict[str, Any]:
        spec = self._spec
        return {
            "id": response_id(spec.request_id),
            "object": "response",
            "created_at": spec.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": _incomplete_details(end) if status == "incomplete" else None,
            "model": spec.model,
            "output": self._items if end else [],
            "previous_response_id": None,
            "service_tier": TIERS.get(spec.service_class, "default"),
            "store": False,
            "top_logprobs": 0,
            "truncation": "disabled",
            **spec.echoed_parameters,
            **({"usage": usage_object(end.usage, self._reasoning_tokens, end)} if end else {}),
            **(validity(end) if end else {}),
        }

    # Items of the output.

    def _write_pieces(self, pieces: list[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, CallStart):
                events += self._close("completed") + self._add_call(piece)
            elif isinstance(piece, CallArguments):
                self._items[-1]["arguments"] += piece.text
                events.append(self._event_for_item("function_call_arguments.delta", delta=piece.text))
            else:
                if not self._open or self._items[-1]["type"] != "message":
                    events += self._close("completed") + self._add_message()
                self._items[-1]["content"][0]["text"] += piece.text
                events.append(self._event_for_part("output_text.delta", delta=piece.text, logprobs=[]))
        return events

    def _write_reasoning(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = []
        if not self._items:
            name = f"rs_{self._spec.request_id.removeprefix('req_')}"
            item = {"id": name, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
            self._items.append({**item, "encrypted_content": None})
            events.append(self._item_event("added"))
            part = {"type": "reasoning_text", "text": ""}
            self._items[-1]["content"].append(part)
            events.append(self._event_for_part("content_part.added", part={**part}))
        self._items[-1]["content"][0]["text"] += text
        return [*events, self._event_for_part("reasoning_text.delta", delta=text)]

    def _add_message(self) -> list[Event]:
        name = f"msg_{self._spec.request_id.removeprefix('req_')}_{len(self._items)}"
        self._items.append({"id": name, "type": "message", "status": "in_progress", "role": "assistant", "content": []})
        added = self._item_event("added")
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items[-1]["content"].append(part)
        return [added, self._event_for_part("content_part.added", part={**part})]

    def _add_call(self, call: CallStart) -> list[Event]:
        call_fields = {"call_id": call_id(self._spec.request_id, 0, call.number), "name": call.name, "arguments": ""}
        name = call_id(self._spec.request_id, 0, call.number, "fc_")
        self._items.append({"id": name, "type": "function_call", "status": "in_progress", **call_fields})
        return [self._item_event("added")]

    def _close(self, status: str) -> list[Event]:
        """Close the open item."""
        if not self._open:
            return []
        self._open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            events = [
                self._event_for_item("function_call_arguments.done", arguments=item["arguments"], name=item["name"])
            ]
        elif item["type"] == "reasoning":
            (part,) = item["content"]
            text_done = self._event_for_part("reasoning_text.done", text=part["text"])
            events = [text_done, self._event_for_part("content_part.done", part=part)]
        else:
            (part,) = item["content"]
            text_done = self._event_for_part("output_text.done", text=part["text"], logprobs=[])
            events = [text_done, self._event_for_part("content_part.done", part=part)]
        return [*events, self._item_event("done")]

    def _item_event(self, event_name: str) -> Event:
        self._open = event_name == "added"
        item = {**self._items[-1]}
        if event_name == "added" and "content" in item:
            item["content"] = []
        return {"type": f"response.output_item.{event_name}", "output_index": len(self._items) - 1, "item": item}

    def _event_for_item(self, event_name: str, **fields: Any) -> Event:
        return {
            "type": f"response.{event_name}",
            "item_id": self._items[-1]["id"],
            "output_index": len(self._items) - 1,
            **fields,
        }

    def _event_for_part(self, event_name: str, **fields: Any) -> Event:
        return self._event_for_item(event_name, content_index=0, **fields)


def _status(reason: FinishReason) -> str:
    return "incomplete" if reason in ("length", "content_filter") else "completed"


def _incomplete_details(end: End | None) -> dict[str, str]:
    is_filtered = end is not None and end.finish_reason == "content_filter"
    return {"reason": "content_filter" if is_filtered else "max_output_tokens"}
