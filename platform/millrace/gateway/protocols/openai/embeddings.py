"""POST /v1/embeddings: bodies read into the internal form, and responses with vectors."""

from __future__ import annotations

import base64
import math
import struct
from typing import Annotated, Any, Literal

from inference_worker.contract.request import SamplingParams, TokenCounts, document
from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import EncoderInputs, InferenceRequest
from millrace.gateway.protocols.buffered_writer import BufferedWriter, usage_object
from millrace.gateway.protocols.documented import Label, NotEmpty, NotNegative, Positive
from millrace.gateway.protocols.openai.parameters import check_labels, read_request
from millrace.gateway.protocols.truncation import TruncationFields, read_truncation

DIALECT = "openai.embedding"
MAX_INPUTS = 2048


class EmbeddingBody(TruncationFields, kw_only=True):
    model: str
    input: (
        NotEmpty
        | Annotated[
            list[NotEmpty | NotNegative | Annotated[list[NotNegative], document(minItems=1)]],
            document(
                minItems=1,
                anyOf=[
                    {"items": {"type": "integer"}},
                    {"items": {"type": ["string", "array"]}, "maxItems": MAX_INPUTS},
                ],
            ),
        ]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Positive | None = None
    user: Label | None = None


def read_embeddings(body: bytes) -> InferenceRequest:
    """Parse the body of an embedding request.

    Raises:
        ApiError: 400 that names the parameter.
    """
    parsed, ignored = read_request(body, EmbeddingBody)
    check_labels({}, {"user": parsed.user})
    inputs = _inputs(parsed.input)
    return InferenceRequest(
        analysis=ignored.make_analysis(),
        model=parsed.model,
        prompt=[],
        sampling=SamplingParams(max_tokens=0),
        encoder=EncoderInputs(inputs, truncation=read_truncation(parsed)),
        max_tokens=0,
        user=parsed.user,
        echoed_parameters={
            "encoding_format": parsed.encoding_format,
            "dimensions": parsed.dimensions,
            "inputs": len(inputs),
        },
    )


def _inputs(value: str | list[str | int | list[int]]) -> tuple[str | list[int], ...]:
    if isinstance(value, str):
        value = [value]
    tokens = [item for item in value if isinstance(item, int)]
    if tokens and len(tokens) == len(value):  # one input, of token ids
        return (tokens,)
    inputs = tuple(item for item in value if not isinstance(item, int))
    if not inputs or tokens:
        raise invalid(
            "input", "input must be a string, a list of strings, a list of token IDs, or a list of such lists."
        )
    if len(inputs) > MAX_INPUTS:
        raise invalid("input", f"At most {MAX_INPUTS} inputs are allowed, not {len(inputs)}.")
    if any(not item for item in inputs):
        raise invalid("input", "An input must not be empty.")
    return inputs


class EmbeddingsWriter(BufferedWriter):
    """A `Writer` of vectors in the order of the inputs."""

    def response(self, data: bytes, usage: TokenCounts) -> dict[str, Any]:
        count, dimensions = self.spec.echoed_parameters["inputs"], self.spec.echoed_parameters["dimensions"]
        size = len(data) // count
        vectors = (data[index * size : (index + 1) * size] for index in range(count))
        write = _floats if self.spec.echoed_parameters["encoding_format"] == "float" else _base64
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": write(_cut(vector, dimensions))}
                for index, vector in enumerate(vectors)
            ],
            "model": self.spec.model,
            "usage": usage_object(usage),
        }


def _cut(vector: bytes, dimensions: int | None) -> bytes:
    """Return the first `dimensions` numbers of the vector, scaled to length 1."""
    if dimensions is None or len(vector) == 4 * dimensions:
        return vector
    numbers = _floats(vector[: 4 * dimensions])
    length = math.hypot(*numbers) or 1.0
    return struct.pack(f"<{dimensions}f", *(number / length for number in numbers))


def _floats(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
