"""Answers in OpenAI's words. Chat completions and completions differ only in how a choice is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from inference_worker.engine.request import TokenUsage
from inference_worker.protocol import End, Tokens
from millrace.gateway.forms import Form, usage_so_far
from millrace.gateway.openai.usage import usage_object

DONE = b"[DONE]"
_encode = msgspec.json.Encoder().encode


class OpenAIWriter(ABC):
    """A `Writer` for one request. Not reusable."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._output_tokens = 0
        self._opened = False

    def stream(self, event: Tokens | End) -> list[bytes]:
        chunks: list[bytes] = []
        if not self._opened:
            self._opened = True
            chunks += self._opening()
        if isinstance(event, Tokens):
            self._output_tokens += len(event.token_ids)
            if event.text:
                usage = usage_so_far(self._form, event.cached_tokens, self._output_tokens)
                chunks.append(self._chunk(self._delta(event.text, None), usage))
            return chunks
        chunks.append(self._chunk(self._delta("", event), event.usage))
        if self._form.include_usage:
            chunks.append(_encode({**self._head(True), "choices": [], "usage": usage_object(event.usage)}))
        return [*chunks, DONE]

    def whole(self, text: str, end: End) -> dict[str, Any]:
        return {**self._head(False), "choices": [self._choice(text, end)], "usage": usage_object(end.usage)}

    def _opening(self) -> list[bytes]:
        return []

    @abstractmethod
    def _head(self, streamed: bool) -> dict[str, Any]:
        """The fields before `choices`."""

    @abstractmethod
    def _delta(self, text: str, end: End | None) -> dict[str, Any]:
        """A streamed choice: new text, or the end."""

    @abstractmethod
    def _choice(self, text: str, end: End) -> dict[str, Any]:
        """The choice of a whole answer."""

    def _chunk(self, choice: dict[str, Any], usage: TokenUsage | None) -> bytes:
        chunk = {**self._head(True), "choices": [choice]}
        if self._form.continuous_usage and usage is not None:
            chunk["usage"] = usage_object(usage)
        elif self._form.include_usage:
            chunk["usage"] = None
        return _encode(chunk)


class ChatWriter(OpenAIWriter):
    def _head(self, streamed: bool) -> dict[str, Any]:
        form = self._form
        return {
            "id": f"chatcmpl-{form.request_id.removeprefix('req_')}",
            "object": "chat.completion.chunk" if streamed else "chat.completion",
            "created": form.created,
            "model": form.model,
            "service_tier": "default",
        }

    def _opening(self) -> list[bytes]:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk(choice, None)]

    def _delta(self, text: str, end: End | None) -> dict[str, Any]:
        delta = {"content": text} if end is None else {}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": end.finish_reason if end else None}

    def _choice(self, text: str, end: End) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": end.finish_reason}


class CompletionWriter(OpenAIWriter):
    def _head(self, streamed: bool) -> dict[str, Any]:
        form = self._form
        return {
            "id": f"cmpl-{form.request_id.removeprefix('req_')}",
            "object": "text_completion",
            "created": form.created,
            "model": form.model,
        }

    def _delta(self, text: str, end: End | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": end.finish_reason if end else None}

    def _choice(self, text: str, end: End) -> dict[str, Any]:
        return self._delta(text, end)
