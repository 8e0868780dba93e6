"""POST /v1/rerank in Cohere's and Jina's format, and POST /v1/score in vLLM's: scores of pairs of texts."""

from __future__ import annotations

import struct
from typing import Annotated, Any

import msgspec

from inference_worker.contract.request import SamplingParams, TokenCounts, document
from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import EncoderInputs, InferenceRequest
from millrace.gateway.protocols.buffered_writer import BufferedWriter, usage_object
from millrace.gateway.protocols.documented import Label, NotEmpty, Positive
from millrace.gateway.protocols.openai.parameters import check_labels, read_request, within
from millrace.gateway.protocols.truncation import TruncationFields, read_truncation
from millrace.gateway.protocols.unknown_fields import IgnoredFields

RERANK, SCORE = "cohere.rerank", "vllm.score"
MAX_PAIRS = 1000
MAX_QUERY_CHARACTERS = 2**21  # characters of a query, counted once for each of its documents
_MAX_NUMBER = 2**31 - 1
# Parameters of Cohere, Jina and vLLM that are not supported, with the values at which they have no effect.
NO_OP: dict[str, tuple[Any, ...]] = {
    "rank_fields": (["text"],),
    "max_chunks_per_doc": (),
    "return_embeddings": (False,),
    "activation": (True,),
    "use_activation": (True,),
    "softmax": (False,),
    "encoding_format": ("float",),
    "stream": (False,),
}
Texts = NotEmpty | Annotated[list[NotEmpty], document(minItems=1, maxItems=MAX_PAIRS)]


class RerankDocument(msgspec.Struct, forbid_unknown_fields=True):
    text: NotEmpty


class RerankBody(TruncationFields, kw_only=True):
    model: str
    query: NotEmpty
    documents: Annotated[list[NotEmpty | RerankDocument], document(minItems=1, maxItems=MAX_PAIRS)]
    top_n: Positive | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Positive | None = None
    user: Label | None = None


class ScoreBody(TruncationFields, kw_only=True):
    model: str
    text_1: Texts
    text_2: Texts
    user: Label | None = None


def read_rerank(body: bytes) -> InferenceRequest:
    """Parse the body of a rerank request.

    Raises:
        ApiError: 400 that names the parameter.
    """
    parsed, ignored = read_request(body, RerankBody, NO_OP, ())
    within("top_n", parsed.top_n, 1, _MAX_NUMBER)
    within("max_tokens_per_doc", parsed.max_tokens_per_doc, 1, _MAX_NUMBER)
    documents = tuple(item if isinstance(item, str) else item.text for item in parsed.documents)
    return _request(
        parsed,
        ignored,
        queries=(parsed.query,),
        inputs=documents,
        names=("query", "documents"),
        max_input_tokens=parsed.max_tokens_per_doc,
        echoed_parameters={
            "top_n": parsed.top_n,
            "documents": documents if parsed.return_documents else None,
        },
    )


def read_score(body: bytes) -> InferenceRequest:
    """Parse the body of a score request.

    Raises:
        ApiError: 400 that names the parameter.
    """
    parsed, ignored = read_request(body, ScoreBody, NO_OP, ())
    first, second = _texts(parsed.text_1), _texts(parsed.text_2)
    if len(first) not in (1, len(second)):
        message = f"text_1 must have one text, or as many as text_2: {len(second)}. It has {len(first)}."
        raise invalid("text_1", message)
    return _request(parsed, ignored, queries=first, inputs=second, names=("text_1", "text_2"))


def _texts(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _request(
    parsed: RerankBody | ScoreBody,
    ignored: IgnoredFields,
    queries: tuple[str, ...],
    inputs: tuple[str, ...],
    names: tuple[str, str],
    max_input_tokens: int | None = None,
    echoed_parameters: dict[str, Any] | None = None,
) -> InferenceRequest:
    check_labels({}, {"user": parsed.user})
    for name, texts in zip(names, (queries, inputs), strict=True):
        if not 1 <= len(texts) <= MAX_PAIRS:
            raise invalid(name, f"{name} must have 1 to {MAX_PAIRS} texts, not {len(texts)}.")
        if "" in texts:
            place = f"{name}[{texts.index('')}]" if len(texts) > 1 else name
            raise invalid(place, f"{place} is empty. Send a text.")
    if len(queries) == 1 and len(queries[0]) * len(inputs) > MAX_QUERY_CHARACTERS:
        message = (
            f"{names[0]} has {len(queries[0])} characters, and {len(inputs)} texts are compared with it. The product"
            f" must be at most {MAX_QUERY_CHARACTERS}. Shorten it, or send fewer texts."
        )
        raise invalid(names[0], message)
    return InferenceRequest(
        analysis=ignored.make_analysis(),
        model=parsed.model,
        prompt=[],
        sampling=SamplingParams(max_tokens=0),
        encoder=EncoderInputs(inputs, queries, max_input_tokens, read_truncation(parsed), names[1]),
        max_tokens=0,
        user=parsed.user,
        echoed_parameters=echoed_parameters or {},
    )


def _scores(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


class RerankWriter(BufferedWriter):
    """A `Writer` of documents in the order of their relevance. Equal scores keep the order of the request."""

    def response(self, data: bytes, usage: TokenCounts) -> dict[str, Any]:
        scores, parameters = _scores(data), self.spec.echoed_parameters
        ranked = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: parameters["top_n"]]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in ranked]
        if parameters["documents"] is not None:
            for result in results:
                result["document"] = {"text": parameters["documents"][result["index"]]}
        return {
            "id": self.spec.request_id,
            "object": "list",
            "model": self.spec.model,
            "results": results,
            "usage": usage_object(usage),
            "meta": {"billed_units": {"search_units": usage.searches}},
        }


class ScoreWriter(BufferedWriter):
    """A `Writer` of scores in the order of the request."""

    def response(self, data: bytes, usage: TokenCounts) -> dict[str, Any]:
        return {
            "id": self.spec.request_id,
            "object": "list",
            "created": self.spec.created,
            "model": self.spec.model,
            "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(_scores(data))],
            "usage": usage_object(usage),
        }
