"""Answers as OpenAI's responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from inference_worker.contract.messages import AnswerEvent, End, Tokens
from inference_worker.contract.request import FinishReason, TokenUsage
from inference_worker.contract.tokenizer import Tokenizer
from millrace.gateway.core.types import ResponseSpec
from millrace.gateway.protocols.openai.writer import TIERS
from millrace.gateway.protocols.tools import CallArguments, CallStart, Piece, answer_parser, call_id

_encode = msgspec.json.Encoder().encode
Event = dict[str, Any]


def usage_object(usage: TokenUsage) -> dict[str, Any]:
    written = usage.cache_write_5m + usage.cache_write_1h
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cache_read, "cache_write_tokens": written},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.output,
    }


def response_id(request_id: str) -> str:
    return f"resp_{request_id.removeprefix('req_')}"


class ResponsesWriter:
    """A `Writer` for one request. Not reusable."""

    def __init__(self, form: ResponseSpec, _: Tokenizer) -> None:
        self._form = form
        self._parser = answer_parser(form.tools)
        self._sequence = 0
        self._begun = False
        self._items: list[dict[str, Any]] = []  # of the output; the last one may be open
        self._open = False

    def stream(self, event: AnswerEvent) -> list[bytes]:
        return [self._numbered(each) for each in self._events(event)]

    def whole(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        told = [each for event in events for each in self._events(event)]
        response: dict[str, Any] = told[-1]["response"]
        return response

    def _numbered(self, event: Event) -> bytes:
        self._sequence += 1
        return _encode({**event, "sequence_number": self._sequence - 1})

    def _events(self, event: AnswerEvent) -> list[Event]:
        if not isinstance(event, Tokens | End):
            return []
        told: list[Event] = []
        if not self._begun:
            self._begun = True
            response = self._response("in_progress", None)
            told += [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]
        if isinstance(event, Tokens):
            return told + self._written(self._parser.push(event.text))
        told += self._written(self._parser.close())
        if not self._items:  # an answer without words is a message all the same
            told += self._add_message()
        status = _status(event.finish_reason)
        told += self._close(status)
        return [*told, {"type": f"response.{status}", "response": self._response(status, event)}]

    def _response(self, status: str, end: End | None) -> dict[str, Any]:
        form = self._form
        return {
            "id": response_id(form.request_id),
            "object": "response",
            "created_at": form.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": form.model,
            "output": self._items if end else [],
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": TIERS.get(form.service_class, "default"),
            "store": False,
            "top_logprobs": 0,
            "truncation": "disabled",
            **form.asked,
            **({"usage": usage_object(end.usage)} if end else {}),
        }

    # The output's items.

    def _written(self, pieces: list[Piece]) -> list[Event]:
        told: list[Event] = []
        for piece in pieces:
            if isinstance(piece, CallStart):
                told += self._close("completed") + self._add_call(piece)
            elif isinstance(piece, CallArguments):
                self._items[-1]["arguments"] += piece.text
                told.append(self._of_item("function_call_arguments.delta", delta=piece.text))
            else:
                if not self._open or self._items[-1]["type"] != "message":
                    told += self._close("completed") + self._add_message()
                self._items[-1]["content"][0]["text"] += piece.text
                told.append(self._of_part("output_text.delta", delta=piece.text, logprobs=[]))
        return told

    def _add_message(self) -> list[Event]:
        name = f"msg_{self._form.request_id.removeprefix('req_')}_{len(self._items)}"
        self._items.append({"id": name, "type": "message", "status": "in_progress", "role": "assistant", "content": []})
        added = self._told_item("added")
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items[-1]["content"].append(part)
        return [added, self._of_part("content_part.added", part={**part})]

    def _add_call(self, call: CallStart) -> list[Event]:
        made = {"call_id": call_id(self._form.request_id, 0, call.number), "name": call.name, "arguments": ""}
        name = call_id(self._form.request_id, 0, call.number, "fc_")
        self._items.append({"id": name, "type": "function_call", "status": "in_progress", **made})
        return [self._told_item("added")]

    def _close(self, status: str) -> list[Event]:
        """End the open item."""
        if not self._open:
            return []
        self._open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            told = [self._of_item("function_call_arguments.done", arguments=item["arguments"], name=item["name"])]
        else:
            (part,) = item["content"]
            done = self._of_part("output_text.done", text=part["text"], logprobs=[])
            told = [done, self._of_part("content_part.done", part=part)]
        return [*told, self._told_item("done")]

    def _told_item(self, what: str) -> Event:
        self._open = what == "added"
        item = {**self._items[-1]}
        if what == "added" and "content" in item:
            item["content"] = []
        return {"type": f"response.output_item.{what}", "output_index": len(self._items) - 1, "item": item}

    def _of_item(self, what: str, **fields: Any) -> Event:
        return {
            "type": f"response.{what}",
            "item_id": self._items[-1]["id"],
            "output_index": len(self._items) - 1,
            **fields,
        }

    def _of_part(self, what: str, **fields: Any) -> Event:
        return self._of_item(what, content_index=0, **fields)


def _status(reason: FinishReason) -> str:
    return "incomplete" if reason == "length" else "completed"
