"""Readers of request bodies, by dialect: from the bytes of a body to its internal form."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.json_numbers import decode_json
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.protocols import rerank, tokenization
from millrace.gateway.protocols.anthropic import messages
from millrace.gateway.protocols.openai import chat, completions, embeddings
from millrace.gateway.protocols.responses import body as responses

COUNT = "anthropic.count"  # a body of count_tokens
WITHOUT_LIMIT = frozenset({COUNT, tokenization.DIALECT})  # their prompts may exceed the context
SOCKET = "openai.realtime"  # a message of the WebSocket


def read_socket_message(body: bytes) -> InferenceRequest:
    """Return the internal form of a chat completion request in a WebSocket message.

    Raises:
        ApiError: 400 that names the parameter.
    """
    try:
        fields = decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ApiError("invalid_json", "A message must be a JSON object.") from None
    for name in ("type", "id"):
        fields.pop(name, None)
    if fields.setdefault("stream", True) is not True:
        raise invalid("stream", "Responses on a WebSocket are always streamed. Omit stream or set it to true.")
    return chat.read_chat(msgspec.json.encode(fields))


READERS: Mapping[str, Callable[[bytes], InferenceRequest]] = {
    chat.DIALECT: chat.read_chat,
    completions.DIALECT: completions.read_completion,
    embeddings.DIALECT: embeddings.read_embeddings,
    rerank.RERANK: rerank.read_rerank,
    rerank.SCORE: rerank.read_score,
    responses.DIALECT: responses.read_response,
    messages.DIALECT: messages.read_messages,
    COUNT: messages.read_count,
    tokenization.DIALECT: tokenization.read_tokenize,
    SOCKET: read_socket_message,
}
MAX_PROMPTS: Mapping[str, int] = {
    completions.DIALECT: completions.MAX_PROMPTS,
    embeddings.DIALECT: embeddings.MAX_INPUTS,
    rerank.RERANK: 1 + rerank.MAX_PAIRS,
    rerank.SCORE: 2 * rerank.MAX_PAIRS,
}  # maximum number of prompts in one request; 1 in other dialects
