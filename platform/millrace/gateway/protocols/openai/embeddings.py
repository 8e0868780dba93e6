"""POST /v1/embeddings: OpenAI's body to the internal form, and vectors to its answer."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from inference_worker.contract.messages import AnswerEvent, End, Vectors
from inference_worker.contract.request import SamplingParams
from inference_worker.contract.tokenizer import Tokenizer
from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import InferenceRequest, ResponseSpec
from millrace.gateway.protocols.openai.parameters import read_body

DIALECT = "openai.embedding"
MAX_INPUTS = 2048
MAX_USER_CHARACTERS = 512
DONE = b"[DONE]"


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


def read_embeddings(body: bytes) -> InferenceRequest:
    """Parse an embedding request's body.

    Raises:
        ApiError: 400 that names the parameter.
    """
    wanted = read_body(body, EmbeddingBody)
    if len(wanted.user or "") > MAX_USER_CHARACTERS:
        raise invalid("user", f"user takes at most {MAX_USER_CHARACTERS} characters.")
    inputs = _inputs(wanted.input)
    return InferenceRequest(
        model=wanted.model,
        prompt=[],
        sampling=SamplingParams(max_tokens=0),
        inputs=inputs,
        max_tokens=0,
        user=wanted.user,
        asked={"encoding_format": wanted.encoding_format, "dimensions": wanted.dimensions, "inputs": len(inputs)},
    )


def _inputs(given: str | list[str | int | list[int]]) -> tuple[str | list[int], ...]:
    if isinstance(given, str):
        given = [given]
    tokens = [each for each in given if isinstance(each, int)]
    if tokens and len(tokens) == len(given):  # one input, of token ids
        return (tokens,)
    inputs = tuple(each for each in given if not isinstance(each, int))
    if not inputs or tokens:
        raise invalid("input", "input must be a text, a list of texts, a list of token ids, or a list of such lists.")
    if len(inputs) > MAX_INPUTS:
        raise invalid("input", f"At most {MAX_INPUTS} inputs are allowed, not {len(inputs)}.")
    if any(not each for each in inputs):
        raise invalid("input", "An input must not be empty.")
    return inputs


class EmbeddingsWriter:
    """A `Writer` for one request. Not reusable."""

    def __init__(self, form: ResponseSpec, _: Tokenizer) -> None:
        self._form = form
        self._events: list[AnswerEvent] = []

    def stream(self, event: AnswerEvent) -> list[bytes]:
        """For who comes back to it: all at the end."""
        self._events.append(event)
        return [msgspec.json.encode(self.whole(self._events)), DONE] if isinstance(event, End) else []

    def whole(self, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        (data,) = (event.data for event in events if isinstance(event, Vectors))
        (end,) = (event for event in events if isinstance(event, End))
        count, dimensions = self._form.asked["inputs"], self._form.asked["dimensions"]
        size = len(data) // count
        vectors = (data[n * size : (n + 1) * size] for n in range(count))
        write = _floats if self._form.asked["encoding_format"] == "float" else _base64
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": write(_cut(vector, dimensions))}
                for index, vector in enumerate(vectors)
            ],
            "model": self._form.model,
            "usage": {"prompt_tokens": end.usage.prompt, "total_tokens": end.usage.prompt},
        }


def _cut(vector: bytes, dimensions: int | None) -> bytes:
    """Return the vector's first numbers, made to have the length 1 again."""
    if dimensions is None or len(vector) == 4 * dimensions:
        return vector
    kept = _floats(vector[: 4 * dimensions])
    length = math.hypot(*kept) or 1.0
    return struct.pack(f"<{dimensions}f", *(x / length for x in kept))


def _floats(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
