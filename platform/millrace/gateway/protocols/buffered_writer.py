"""The writer of responses that are complete only when the request has ended, such as vectors and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.messages import AnswerEvent, End, Vectors
from inference_worker.contract.request import TokenCounts
from millrace.gateway.core.types import ResponseSpec

DONE = b"[DONE]"


class BufferedWriter(ABC):
    """A `Writer` for one response of an encoder."""

    def __init__(self, spec: ResponseSpec, _: Tokenizer) -> None:
        self.spec = spec
        self._events: list[AnswerEvent] = []

    @abstractmethod
    def response(self, data: bytes, usage: TokenCounts) -> dict[str, Any]:
        """Return the response for the encoder's numbers, which are float32 in the order of the inputs."""

    def stream(self, event: AnswerEvent) -> list[bytes]:
        """Return the whole response at the end, for a client that resumes the request."""
        self._events.append(event)
        return [msgspec.json.encode(self.build_response(self._events)), DONE] if isinstance(event, End) else []

    def interrupt(self, code: str, usage: TokenCounts | None) -> list[bytes]:
        return []

    def build_response(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        (data,) = (event.data for event in events if isinstance(event, Vectors))
        (end,) = (event for event in events if isinstance(event, End))
        response = self.response(data, end.usage)
        if self.spec.truncated:  # also a header, which a result of a batch does not have
            response["truncated"] = self.spec.truncated
        return response


def usage_object(usage: TokenCounts) -> dict[str, int]:
    """Return OpenAI's usage object for a request without output."""
    return {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}
