"""Streams and vectors of OpenAI-compatible servers."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from inference_worker.contract.request import FinishReason, RequestOutput, TokenCounts, ToolCallDelta
from inference_worker.contract.upstreams import UpstreamRequest
from inference_worker.worker.relay.decoders import MAX_CALLS, Count, StreamDecoder, read_usage
from inference_worker.worker.relay.failures import broken, error_event

DONE = b"[DONE]"
_REASONS: dict[str, FinishReason] = {"length": "length", "max_tokens": "length", "content_filter": "content_filter"}


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None  # text of completions
    finish_reason: str | None = None
    stop_reason: Any = None  # stop string of vLLM and Millrace


class _PromptDetails(msgspec.Struct):
    cached_tokens: Count | None = None
    cache_write_tokens: Count | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count | None = None
    total_tokens: Count | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    prompt_cache_hit_tokens: Count | None = None  # cached tokens of DeepSeek


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: msgspec.Raw = msgspec.Raw()
    error: Any = None


class _Vector(msgspec.Struct):
    embedding: list[float]
    index: int = 0


class _Vectors(msgspec.Struct):
    data: list[_Vector]
    usage: msgspec.Raw = msgspec.Raw()


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_vectors = msgspec.json.Decoder(_Vectors).decode
_decode_usage = msgspec.json.Decoder(_Usage | None).decode


class OpenAIDecoder(StreamDecoder):
    """A decoder of a streamed chat completion or completion."""

    def __init__(self, engine_id: str, request: UpstreamRequest, answers: int, max_tokens: int) -> None:
        super().__init__(engine_id, request, answers, max_tokens)
        self._calls: dict[int, list[str]] = {}  # sequence -> the key of each call
        self._call_ids: dict[tuple[int, str], str] = {}  # ids of the calls that have one

    def decode(self, data: bytes) -> list[RequestOutput]:
        if data == DONE:
            self.is_complete = True
            return []
        try:
            chunk = _decode_chunk(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise broken("The model's provider sent a malformed event.") from None
        if chunk.error is not None:
            raise error_event(chunk.error)
        usage = read_usage(chunk.usage, _decode_usage)
        if usage is not None and (usage.completion_tokens is not None or usage.prompt_tokens):
            self._usage = _counts(usage)
            details = usage.completion_tokens_details
            self._reasoning_tokens = details.reasoning_tokens or 0 if details is not None else 0
        return [output for choice in chunk.choices or () for output in self._choice(choice)]

    def _choice(self, choice: _Choice) -> list[RequestOutput]:
        index = choice.index
        if not 0 <= index < self._answers:
            raise broken("The model's provider sent an answer that was not requested.")
        if choice.finish_reason:
            stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
            self._reasons[index] = _REASONS.get(choice.finish_reason, "stop"), stop
        delta = choice.delta
        if delta is None:
            return [self._content(index, choice.text)] if choice.text else []
        text, reasoning = _content(delta.content)
        text += delta.refusal or ""
        reasoning += delta.reasoning_content or (delta.reasoning if isinstance(delta.reasoning, str) else "")
        calls = [part for call in delta.tool_calls or () for part in self._call(index, call)]
        return [self._content(index, text, reasoning, calls)] if text or reasoning or calls else []

    def _call(self, sequence: int, call: _Call) -> list[ToolCallDelta]:
        known = self._calls.setdefault(sequence, [])
        # Some servers send whole calls without an index.
        key = call.id or f"#{len(known)}" if call.index is None else str(call.index)
        function = call.function or _Function()
        arguments = function.arguments or ""
        if isinstance(arguments, dict):
            arguments = msgspec.json.encode(arguments).decode()
        if call.id and function.name and self._call_ids.setdefault((sequence, key), call.id) != call.id:
            known[known.index(key)] = ""  # some servers send several calls with the same index
            self._call_ids[sequence, key] = call.id
        if key in known:
            return [ToolCallDelta(known.index(key), "", arguments)] if arguments else []
        if not function.name or len(known) == MAX_CALLS:
            raise broken("The model's provider sent a malformed tool call.")
        known.append(key)
        return [ToolCallDelta(len(known) - 1, function.name, arguments)]


def decode_vectors(engine_id: str, body: bytes, request: UpstreamRequest, count: int) -> RequestOutput:
    """Return the output of an embedding request with `count` inputs.

    Raises:
        UpstreamFailed: the response is malformed.
    """
    try:
        decoded = _decode_vectors(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise broken("The model's provider sent a malformed response.") from None
    vectors = sorted(decoded.data, key=lambda each: each.index)
    lengths = {len(each.embedding) for each in vectors}
    if [each.index for each in vectors] != list(range(count)) or len(lengths) != 1 or lengths == {0}:
        raise broken("The model's provider sent a wrong number of vectors.")
    numbers = array("f", [number for each in vectors for number in each.embedding]).tobytes()
    usage, source = TokenCounts(uncached=request.estimated_tokens), "estimated"
    reported = read_usage(decoded.usage, _decode_usage)
    if reported is not None and reported.prompt_tokens:
        usage, source = TokenCounts(uncached=reported.prompt_tokens), "upstream"
    return RequestOutput(
        engine_id,
        finish_reason="stop",
        usage=usage,
        vectors=numbers,
        usage_source=source,  # type: ignore[arg-type]
    )


def _content(content: str | list[Any] | None) -> tuple[str, str]:
    """Return the text and the reasoning of a content, which Mistral sends as parts."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else "", ""
    text, reasoning = "", ""
    for part in content:
        fields = part if isinstance(part, dict) else {}
        if fields.get("type") == "thinking":
            reasoning += _content(fields.get("thinking"))[0]
        elif isinstance(fields.get("text"), str):
            text += fields["text"]
    return text, reasoning


def _counts(usage: _Usage) -> TokenCounts:
    prompt, output = usage.prompt_tokens, usage.completion_tokens or 0
    details = usage.completion_tokens_details
    if usage.total_tokens is not None and details is not None and details.reasoning_tokens:
        # Some providers do not count the reasoning as a part of the completion.
        output = max(output, min(usage.total_tokens - prompt, output + details.reasoning_tokens))
    cached = usage.prompt_cache_hit_tokens or 0
    written = 0
    if usage.prompt_tokens_details is not None:
        cached = usage.prompt_tokens_details.cached_tokens or cached
        written = usage.prompt_tokens_details.cache_write_tokens or 0
    cached = min(cached, prompt)
    written = min(written, prompt - cached)
    return TokenCounts(prompt - cached - written, cached, written, output=output)
