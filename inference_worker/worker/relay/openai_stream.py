"""Streams and vectors of OpenAI-compatible servers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from inference_worker.contract.request import RequestOutput, TokenCounts, ToolCallDelta
from inference_worker.contract.upstreams import UpstreamRequest, UsageSource
from inference_worker.worker.relay.decoders import (
    MAX_CALLS,
    StreamDecoder,
    merge_counts,
    read_count,
    read_object,
    read_part,
)
from inference_worker.worker.relay.failures import error_event, make_upstream_failure

DONE = b"[DONE]"


class _Choice(msgspec.Struct):
    index: Any = 0
    delta: Any = None
    text: Any = None  # text of completions
    finish_reason: Any = None
    stop_reason: Any = None  # stop string of vLLM and Millrace
    usage: msgspec.Raw = msgspec.Raw()  # where Moonshot has it


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: msgspec.Raw = msgspec.Raw()
    x_groq: msgspec.Raw = msgspec.Raw()  # has the usage of Groq
    error: Any = None


class _Vector(msgspec.Struct):
    embedding: list[float]
    index: int = 0


class _Vectors(msgspec.Struct):
    data: list[_Vector]
    usage: msgspec.Raw = msgspec.Raw()


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_vectors = msgspec.json.Decoder(_Vectors).decode


@dataclass
class _Call:
    """A tool call of a stream.

    index: the upstream's number of it; None if it sends none.
    pending: arguments that arrived before the name.
    """

    number: int
    index: int | None
    id: str = ""
    name: str = ""
    pending: str = ""


class OpenAIDecoder(StreamDecoder):
    """A decoder of a streamed chat completion or completion."""

    def __init__(self, engine_id: str, request: UpstreamRequest, answers: int, max_tokens: int) -> None:
        super().__init__(engine_id, request, answers, max_tokens)
        self._request = request
        self._reported: dict[str, int] = {}  # counts of the upstream
        self._calls: dict[int, list[_Call]] = {}  # calls of each sequence

    def decode(self, data: bytes) -> list[RequestOutput]:
        data = data.strip()
        if data == DONE:
            self.is_complete = True
        if data in (DONE, b""):
            return []
        try:
            chunk = _decode_chunk(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise make_upstream_failure("The model's provider sent a malformed event.") from None
        if chunk.error is not None:
            raise error_event(chunk.error)
        if usage := read_object(chunk.usage) or read_part(read_object(chunk.x_groq), "usage"):
            merge_counts(self._reported, _name_counts(usage))
        return [output for choice in chunk.choices or () for output in self._choice(choice)]

    def usage(self) -> tuple[TokenCounts, UsageSource]:
        counts, source = _count(self._reported, self._estimated_prompt, self._estimated_output())
        self._reasoning_tokens = self._reported.get("reasoning", 0)
        return counts, source

    def finish(self) -> list[RequestOutput]:
        calls = [
            self._name_call(sequence, call) for sequence, each in self._calls.items() for call in each if not call.name
        ]
        return [*calls, *super().finish()]

    def _choice(self, choice: _Choice) -> list[RequestOutput]:
        index = read_count(choice.index)
        if index is None and self._answers == 1:
            index = 0
        if index is None or index >= self._answers:
            raise make_upstream_failure("The model's provider sent an answer that was not requested.")
        if usage := read_object(choice.usage):
            merge_counts(self._reported, _name_counts(usage))
        if choice.finish_reason and isinstance(choice.finish_reason, str):
            stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
            self._note_finish(index, choice.finish_reason, stop)
        if not isinstance(choice.delta, dict):
            return [self._content(index, choice.text)] if choice.text and isinstance(choice.text, str) else []
        delta = choice.delta
        text, reasoning = _content(delta.get("content"))
        text += _read_text(delta.get("refusal"))
        reasoning += _read_text(delta.get("reasoning_content")) or _read_text(delta.get("reasoning"))
        given = delta.get("tool_calls")
        calls = [part for call in (given if isinstance(given, list) else ()) for part in self._call(index, call)]
        return [self._content(index, text, reasoning, calls)] if text or reasoning or calls else []

    def _call(self, sequence: int, given: Any) -> list[ToolCallDelta]:
        """Return the parts of a call. Those of a call without a name are kept until the name arrives."""
        if not isinstance(given, dict):
            return []
        function = read_part(given, "function")
        name, arguments = _read_text(function.get("name")), function.get("arguments")
        if arguments is not None and not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        call = self._find_call(sequence, read_count(given.get("index")), str(given.get("id") or ""), name)
        if call.name or not name:
            if not call.name:
                call.pending += arguments or ""
                self._note_extra(len(arguments or ""))
                return []
            return [ToolCallDelta(call.number, "", arguments)] if arguments else []
        call.name, pending = name, call.pending
        return [ToolCallDelta(call.number, name, pending + (arguments or ""))]

    def _find_call(self, sequence: int, index: int | None, call_id: str, name: str) -> _Call:
        """Return the call to which a part belongs: by its index, by its id, or the last one.

        Some servers send whole calls without an index, several calls with the same index, or the index only once.
        """
        calls = self._calls.setdefault(sequence, [])
        found = None
        if index is not None:
            found = next((call for call in reversed(calls) if call.index == index), None)
            if found is not None and name and call_id and found.id and found.id != call_id:
                found = None
        elif call_id:
            found = next((call for call in reversed(calls) if call.id == call_id), None)
        elif calls and not (name and calls[-1].name):
            found = calls[-1]
        if found is None:
            if len(calls) == MAX_CALLS:
                raise make_upstream_failure("The model's provider sent a malformed tool call.")
            found = _Call(len(calls), index)
            calls.append(found)
        found.id = found.id or call_id
        return found

    def _name_call(self, sequence: int, call: _Call) -> RequestOutput:
        """Return a call whose name never arrived, with the name of the only tool that it can be.

        Raises:
            UpstreamFailed: there are several tools.
        """
        tools = read_object(msgspec.Raw(self._request.body)).get("tools")
        names = [_read_text(read_part(tool, "function").get("name")) for tool in tools or () if isinstance(tool, dict)]
        if len(names) != 1 or not names[0]:
            raise make_upstream_failure("The model's provider sent a tool call without a name.")
        call.name = names[0]
        return self._content(sequence, calls=[ToolCallDelta(call.number, call.name, call.pending)])


def decode_vectors(engine_id: str, body: bytes, request: UpstreamRequest, count: int) -> RequestOutput:
    """Return the output of an embedding request with `count` inputs.

    Raises:
        UpstreamFailed: the response is malformed.
    """
    try:
        decoded = _decode_vectors(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise make_upstream_failure("The model's provider sent a malformed response.") from None
    vectors = sorted(decoded.data, key=lambda each: each.index)
    lengths = {len(each.embedding) for each in vectors}
    if [each.index for each in vectors] != list(range(count)) or len(lengths) != 1 or lengths == {0}:
        raise make_upstream_failure("The model's provider sent a wrong number of vectors.")
    numbers = array("f", [number for each in vectors for number in each.embedding]).tobytes()
    usage, source = TokenCounts(uncached=request.estimated_tokens), "estimated"
    prompt = _name_counts(read_object(decoded.usage))["prompt"]
    if prompt:
        usage, source = TokenCounts(uncached=prompt), "upstream"
    return RequestOutput(
        engine_id,
        finish_reason="stop",
        usage=usage,
        vectors=numbers,
        usage_source=source,  # type: ignore[arg-type]
    )


def _content(content: Any) -> tuple[str, str]:
    """Return the text and the reasoning of a content, which Mistral sends as parts."""
    if not isinstance(content, list):
        return _read_text(content), ""
    text, reasoning = "", ""
    for part in content:
        fields = part if isinstance(part, dict) else {}
        if fields.get("type") == "thinking":
            reasoning += _content(fields.get("thinking"))[0]
        else:
            text += _read_text(fields.get("text"))
    return text, reasoning


def _read_text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _name_counts(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a server reports as the counts of a usage, by our names. Its values may be anything."""

    def find(*places: tuple[str, ...]) -> Any:
        """Return the first value that is a count other than zero, or else a zero, or None."""
        values = [
            read_count((read_part(usage, place[0]) if len(place) == 2 else usage).get(place[-1])) for place in places
        ]
        return next(filter(None, values), next((value for value in values if value is not None), None))

    prompt_details, output_details = "prompt_tokens_details", "completion_tokens_details"
    return {
        "prompt": find(("prompt_tokens",), ("input_tokens",)),
        "output": find(("completion_tokens",), ("output_tokens",)),
        "total": find(("total_tokens",)),
        "cached": find(
            (prompt_details, "cached_tokens"), ("input_tokens_details", "cached_tokens"), ("prompt_cache_hit_tokens",),
            ("cached_tokens",), ("cache_read_input_tokens",),
        ),
        "written": find(
            (prompt_details, "cache_write_tokens"), (prompt_details, "cache_creation_tokens"),
            ("cache_creation_input_tokens",),
        ),
        "reasoning": find(
            (output_details, "reasoning_tokens"), ("output_tokens_details", "reasoning_tokens"), ("reasoning_tokens",)
        ),
    }  # fmt: skip


def _count(
    reported: Mapping[str, int], estimated_prompt: int, estimated_output: int
) -> tuple[TokenCounts, UsageSource]:
    """Return the usage of reported counts. Those that are missing, or zero beside an answer, are estimated."""
    prompt, output, total = reported.get("prompt", 0), reported.get("output", 0), reported.get("total", 0)
    if not prompt and not output:
        return TokenCounts(uncached=estimated_prompt, output=estimated_output), "estimated"
    cached, written, reasoning = (reported.get(name, 0) for name in ("cached", "written", "reasoning"))
    source: UsageSource = "upstream"
    if not prompt and not cached:
        prompt, source = estimated_prompt, "estimated"
    if not output and total > prompt:
        output = total - prompt
    elif not output and (estimated_output or "output" not in reported):
        output, source = estimated_output, "estimated"
    others = cached + written
    if others and total in (prompt + others + output, prompt + others + output + reasoning):
        prompt += others  # some servers do not count cached tokens as a part of the prompt, which the total shows
    if reasoning:
        # Some servers do not count the reasoning as a part of the completion.
        output = max(output, min(total - prompt, output + reasoning))
    cached = min(cached, prompt)
    written = min(written, prompt - cached)
    return TokenCounts(prompt - cached - written, cached, written, output=output), source
